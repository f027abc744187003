"""Write the name of the decoupled writer's last save to `latest`.

https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py#L1264
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NoMatch, Source

ENGINE = "deepspeed.runtime.engine"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py#L1264",),
    symptom="a restart goes back to the save before the last one",
    releases=(("0.17.1", "0.17.1"), ("0.18.4", newest("deepspeed"))),
    stacks="decoupled checkpoint writer",
    silent=True,
    test="tests/unit/checkpoint/test_decoupled_last_save.py",
)

COMMIT = "self._commit_decoupled_checkpoint()"
CLEANUPS = ("checkpoint_engine.cleanup()", "self.checkpoint_engine.cleanup()")  # the second up to 0.18.4
COMMIT_FIRST = """try:
    {commit}
finally:
    {cleanup}"""


@fix.edit("deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine")
def a_writer_starts(source: Source) -> None:
    """In 0.17.2 to 0.18.3 none does: torch has no function of this name."""
    if b"mp.get_start_methods(" in source.data:
        raise NoMatch("expected a writer that starts, found mp.get_start_methods()")


@fix.edit(ENGINE)
def commit_and_name_what_is_pending(source: Source) -> None:
    """The next step commits a save and updates `latest`; at the end, `cleanup` only commits the files."""
    destroy = source.function("DeepSpeedEngine.destroy")
    source.skip_if(COMMIT, within=destroy)
    cleanup = source.first_there(*CLEANUPS, within=destroy)
    source.replace(source.one(cleanup, within=destroy), COMMIT_FIRST.format(commit=COMMIT, cleanup=cleanup))
