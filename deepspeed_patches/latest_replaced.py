"""Replace `latest` atomically, so that a crash leaves either the old or the new name.

https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py#L4960
"""

import ast

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NoMatch, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os

ENGINE = "deepspeed.runtime.engine"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py#L4960",),
    symptom="a restart fails: a crash in a save has left `latest` empty",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="every checkpoint",
    silent=False,
    test="tests/unit/checkpoint/test_latest_replaced.py",
)

LATEST = "os.path.join(..., 'latest')"
OPEN = f"open({LATEST}, 'w')"


def _replace_file(path: "str", text: "str") -> None:
    """Write a text file. A crash leaves the old or the new one."""
    temporary = f"{path}.{os.urandom(4).hex()}.tmp"  # each node may write the same file
    with open(temporary, "w") as fd:
        fd.write(text)
        fd.flush()
        os.fsync(fd.fileno())
    os.replace(temporary, path)
    try:
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)  # so that the new name is on disk, too
        finally:
            os.close(folder)
    except OSError:  # some systems cannot do this, and the file is complete
        pass


@fix.edit(ENGINE)
def write_a_temporary_file_and_rename_it(source: Source) -> None:
    """Upstream truncates and rewrites the file; since 0.17.1 also in a second place, for background writers."""
    writes = [
        found for found in source.all_of(ast.With, having=LATEST) if source.has(OPEN, found.items[0].context_expr)
    ]
    source.skip_if(f"_replace_file({LATEST}, ...)", *(False for _ in writes), _replace_file)
    if not writes:
        raise NoMatch("expected a place that writes `latest`, found none")
    for statement in writes:
        path, written = source.one(LATEST, statement), source.one("fd.write(...)", statement)
        if len(statement.body) != 1:
            raise NoMatch(f"expected `{source.text(written)}` alone, found {len(statement.body)} statements")
        source.replace(statement, f"_replace_file({source.text(path)}, {source.text(written.args[0])})")
    source.insert_function_before("DeepSpeedEngine", _replace_file)
