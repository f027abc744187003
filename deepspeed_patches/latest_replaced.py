"""Replace `latest` in one step, so that a crash leaves the old name or the new one.

https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py#L4960
"""

import ast

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

ENGINE = "deepspeed.runtime.engine"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py#L4960",),
    symptom="a restart fails: a crash in a save has left `latest` empty",
    releases=(("0.12.0", newest("deepspeed")),),
    stacks="every checkpoint",
    silent=False,
    stages=("latest",),
    test="tests/unit/checkpoint/test_latest_replaced.py",
)

LATEST = "os.path.join(..., 'latest')"
OPEN, OPEN_TEMPORARY = f"open({LATEST}, 'w')", "open(latest + '.tmp', 'w')"
SYNC = ("fd.flush()", "os.fsync(fd.fileno())")
RENAME = "os.replace(latest + '.tmp', latest)"


@fix.edit(ENGINE)
def write_a_temporary_file_and_rename_it(source: Source) -> None:
    """Upstream truncates the file and writes it anew; since 0.17.1 at a second place, for background writers."""
    calls = [*source.all(OPEN), *source.all(OPEN_TEMPORARY)]
    writes = [found for found in source.all_of(ast.With) if found.items[0].context_expr in calls]
    source.check_parts(parts_there(source, writes) or {"a place that writes `latest`": False})
    for statement in writes:
        path = source.one(LATEST, within=statement)
        source.insert_before(statement, f"latest = {source.text(path)}")
        source.replace(path, "latest + '.tmp'")
        source.insert_after(source.one("fd.write(...)", within=statement), "\n".join(SYNC))
        source.insert_after(statement, RENAME)


def parts_there(source: Source, writes: list[ast.With]) -> dict[str, bool]:
    """Of each place what it has of this fix."""
    parts = {
        f"{number}: {part}": source.has(part, within=statement)
        for number, statement in enumerate(writes)
        for part in (OPEN_TEMPORARY, *SYNC)
    }
    renames = len(source.all(RENAME))
    return parts | {f"{number}: {RENAME}": number < renames for number in range(len(writes))}
