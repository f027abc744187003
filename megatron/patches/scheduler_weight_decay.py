"""Take the step of a scheduler's load after the weight decay is loaded.

https://github.com/NVIDIA/Megatron-LM/pull/5213
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NoMatch, NotNeeded, Source

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/Megatron-LM/pull/5213",),
    symptom="the first iteration after a resume has this run's weight decay, not the checkpoint's",
    releases=(("0.12.0", newest("megatron-core")),),
    stacks="`--use-checkpoint-opt-param-scheduler` with another weight decay",
    silent=True,
    test="tests/unit_tests/dist_checkpointing/test_scheduler_weight_decay.py",
)

STEP = "self.step(increment=num_steps)"


@fix.edit("megatron.core.optimizer_param_scheduler")
def step_with_loaded_weight_decay(source: Source) -> None:
    """Upstream steps before it loads the weight decay, so the next iteration uses this run's."""
    load = source.function("OptimizerParamScheduler.load_state_dict")
    weight_decay = source.branch("'start_wd' in state_dict", within=load)
    step = source.one(STEP, within=load)
    both = [
        node for node in load.body if node is weight_decay or getattr(node, "value", None) is step
    ]
    if both[:1] == [weight_decay] and len(both) == 2:
        raise NotNeeded
    if len(both) != 2 or load.body[-1] is not weight_decay:
        raise NoMatch(f"expected `{STEP}` in {load.name}, which ends with the weight decay")
    indent = " " * weight_decay.col_offset
    lines = [line.removeprefix(indent) for line in source.text(weight_decay).splitlines()]
    source.remove(weight_decay)
    source.insert_before(step, "\n".join([*lines, ""]))
