"""Discard the calls, the forked worker and the results of an aborted save.

https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5842
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NoMatch, Source

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5842",),
    symptom="after an abort, a save is finalized with the index of another one",
    releases=(("0.5.0", newest("nvidia-resiliency-ext")),),
    stacks="in-process restart during an asynchronous save",
    silent=True,
    test="tests/checkpointing/unit/test_nvrx_aborted_save.py",
)

FORGET = """if abort:
    # Aborted calls are not finalized, and their results do not belong to the next save
    while self.async_calls:
        self.async_calls.popleft().async_caller.close(abort=True)
    from . import filesystem_async

    filesystem_async._results_queue = None"""


@fix.edit("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
def forget_what_was_aborted(source: Source) -> None:
    """Upstream finalizes the aborted calls with the next save, which reads the oldest result in the queue."""
    close = source.function("AsyncCallsQueue.close")
    if "abort" not in [argument.arg for argument in close.args.args]:
        raise NoMatch(f"expected {close.name} with a parameter `abort`, found none")  # before 0.5
    source.skip_if("filesystem_async._results_queue = None", within=close)
    source.insert_before(source.branch("self.persistent and self.persistent_caller", close), FORGET)
