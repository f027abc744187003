"""Raise on all ranks when the process that writes an asynchronous save has died.

https://github.com/NVIDIA/Megatron-LM/issues/6970
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source
from ckpt_patches.engine.worker_end import raise_at_the_end_of_a_worker

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/issues/6970",
        "https://github.com/NVIDIA/Megatron-LM/issues/6971",
    ),
    symptom="training hangs after the process that writes a save was killed",
    releases=(("0.12.0", newest("megatron-core")),),
    stacks="asynchronous saves; from 0.17.0 `--async-strategy mcore`",
    test="tests/unit_tests/dist_checkpointing/test_async_dead_worker.py",
)


@fix.edit("megatron.core.dist_checkpointing.strategies.async_utils")
def watch_the_worker(source: Source) -> None:
    """A dead worker never finishes its save: upstream waits forever, or treats the save as complete."""
    raise_at_the_end_of_a_worker(source)
