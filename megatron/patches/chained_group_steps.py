"""Give the step of a chain of optimizers to those that have no parameters on the rank.

https://github.com/NVIDIA/TransformerEngine/issues/1986
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/TransformerEngine/issues/1986",
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/3832",
    ),
    symptom="experts count their steps from 1 after a resume, if the first pipeline stage has none",
    releases=(("0.15.0", newest("megatron-core")),),
    stacks="MoE with dense layers on the first pipeline stage, FusedAdam, `fully_reshardable`",
    silent=True,
    test="tests/unit_tests/dist_checkpointing/test_chained_group_steps.py",
)

HAS_STEP = "step is not None"


@fix.edit("megatron.core.optimizer.optimizer")
def align_empty_groups(source: Source) -> None:
    """Upstream means to do this, but asks of the second loop what it asks of the first: a group that has a step.

    The groups of rank 0 are saved for all ranks of a parameter; FusedAdam counts no step of an empty one.
    """
    source.one(
        "DistributedOptimizer.checkpoint_fully_reshardable_formats"
    )  # since 0.15, with the bug
    align = source.function("ChainedOptimizer._synchronize_steps")
    source.skip_if(HAS_STEP, within=align)
    source.replace(source.branch_around("param_group['step'] = step", within=align).test, HAS_STEP)
