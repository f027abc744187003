"""Raise on all ranks when the process that writes an asynchronous save has died.

https://github.com/NVIDIA/Megatron-LM/issues/6970
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source
from ckpt_patches.engine.worker_end import raise_at_the_end_of_a_worker

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/Megatron-LM/issues/6970",),
    symptom="training hangs, or a part of a file is called saved, after its writer died",
    releases=(("0.4.1", newest("nvidia-resiliency-ext")),),
    stacks="asynchronous saves; a forked worker of `TorchAsyncCheckpoint`",
    silent=True,
    test="tests/checkpointing/unit/test_nvrx_dead_worker.py",
)


@fix.edit("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
def watch_the_worker(source: Source) -> None:
    """A dead worker never finishes its save: upstream waits forever, or treats the save as complete."""
    raise_at_the_end_of_a_worker(source)
