"""Load the checkpoint that `--ckpt-step` names, although there is a newer non-persistent one.

https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5260
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5260",),
    symptom="`--ckpt-step` is ignored, the newest non-persistent checkpoint is loaded",
    releases=(("0.17.0", newest("megatron-core")),),
    stacks="`megatron.training`: `--non-persistent-ckpt-type`",
    silent=True,
    test="tests/unit_tests/dist_checkpointing/test_ckpt_step_non_persistent.py",
)

ANOTHER = """if non_persistent_iteration != iteration:
    non_persistent_iteration = -1  # another one was asked for"""


@fix.edit("megatron.training.checkpointing")
def load_no_other(source: Source) -> None:
    """The newest non-persistent checkpoint is compared with the iteration that was asked for, and taken if newer."""
    load = source.function("_load_base_checkpoint")
    source.skip_if(ANOTHER, within=load)
    source.insert_after(source.one("iteration = args.ckpt_step", within=load), ANOTHER)
