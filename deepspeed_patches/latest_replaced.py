"""Replace `latest` atomically, so that a crash leaves either the old or the new name.

https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py#L4960
"""

import ast

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NoMatch, Source

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
OPEN, OPEN_TEMPORARY = f"open({LATEST}, 'w')", f"open({LATEST} + '.tmp', 'w')"
LONG = 40  # characters of the path, which is in the statement twice
SYNC = "fd.flush()\nos.fsync(fd.fileno())"


@fix.edit(ENGINE)
def write_a_temporary_file_and_rename_it(source: Source) -> None:
    """Upstream truncates and rewrites the file; since 0.17.1 also in a second place, for background writers."""
    writes = [found for found in source.all_of(ast.With, having=LATEST) if source.has(LATEST, found)]
    if not writes:
        raise NoMatch("expected a place that writes `latest`, found none")
    source.skip_if(*(part for statement in writes for part in parts_of(source, statement)))
    for call in source.some(OPEN):
        statement = next(found for found in writes if found.items[0].context_expr is call)
        source.insert_at(call.args[0], " + '.tmp'", end=True)
        source.insert_after(source.one("fd.write(...)", within=statement), SYNC)
        source.insert_after(statement, renaming(source, call.args[0]))


def parts_of(source: Source, statement: ast.With) -> tuple[tuple[str, ast.AST], ...]:
    renamed = renaming(source, source.all(LATEST, statement)[0])
    return (
        (OPEN_TEMPORARY, statement),
        ("fd.flush()", statement),
        ("os.fsync(fd.fileno())", statement),
        (renamed, source.tree),
    )


def renaming(source: Source, path: ast.expr) -> str:
    """The statement that renames the temporary file, split into two lines if too long."""
    gap = "" if len(source.text(path)) < LONG else "\n    "
    return f"os.replace({gap}{source.text(path)} + '.tmp', {source.text(path)})"
