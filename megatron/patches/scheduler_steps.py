"""Replace the scheduler's step count with the loaded one, instead of adding the two.

https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.2/megatron/core/optimizer_param_scheduler.py
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.2/megatron/core/optimizer_param_scheduler.py",
    ),
    symptom="a run that rolls back to a checkpoint continues at a wrong learning rate",
    releases=(("0.12.0", newest("megatron-core")),),
    stacks="a load into a scheduler that has stepped: a rollback, a second load",
    silent=True,
    test="tests/unit_tests/dist_checkpointing/test_scheduler_steps.py",
)


@fix.edit("megatron.core.optimizer_param_scheduler")
def begin_with_no_steps(source: Source) -> None:
    """The load ends with `self.step(increment=num_steps)`, which adds to the current steps."""
    load = source.function("OptimizerParamScheduler.load_state_dict")
    source.skip_if("self.num_steps = ...", within=load)
    source.insert_before(
        source.branch("'num_iters' in state_dict", within=load),
        "self.num_steps = 0  # step() adds those of the checkpoint",
    )
