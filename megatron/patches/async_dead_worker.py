"""Raise on all ranks when the process that writes an asynchronous save has died.

https://github.com/NVIDIA/Megatron-LM/issues/6970
"""

from ckpt_patches.engine.fix import Fix, load
from ckpt_patches.engine.releases import newest

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


# The classes of both packages have a common origin, but keep the queues in different places.
watch_the_worker = load("nvrx_dead_worker").edits[0].function
fix.edit("megatron.core.dist_checkpointing.strategies.async_utils")(watch_the_worker)
