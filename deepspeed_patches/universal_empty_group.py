"""Load a universal checkpoint on ranks that own only padding of a param group.

https://github.com/deepspeedai/DeepSpeed/pull/5289
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os

    import torch

BASE_OPTIMIZER = "deepspeed.runtime.base_optimizer"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/5289",),
    symptom="a load fails with `IndexError: list index out of range` at `steps[0]`",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="universal load, ZeRO 1 and 2, small param group",
    silent=False,
    test="tests/unit/checkpoint/test_universal_empty_group.py",
)

LOAD = "ZeROOptimizer.load_hp_checkpoint_state_from_checkpoint_dir"
GUARD = "steps and "
STEP = "steps[0] is not None"
PADDING = """if not steps and lp_groups[i]:
    # Only padding: training keeps it at the group's step, with zero states.
    folder = os.path.join(checkpoint_dir, self.param_names[lp_groups[i][0]])
    steps, opt_keys = _step_and_state_keys(folder)"""


def _step_and_state_keys(folder: str) -> "tuple[list[object], set[str]]":
    """Return a parameter's step (None if not saved) and the names of its states except fp32."""
    if not os.path.isdir(folder):  # experts have global numbers there, and all the same step
        folder = folder.replace("deepspeed_experts.", "deepspeed_experts.global_")
    keys = {name for name, extension in map(os.path.splitext, os.listdir(folder)) if extension == ".pt"}
    step = torch.load(os.path.join(folder, "step.pt"), weights_only=True) if "step" in keys else None
    return [step], keys - {"fp32", "step"}


@fix.edit(BASE_OPTIMIZER)
def take_step_and_states_from_the_group(source: Source) -> None:
    """Upstream takes them from the parameters that a rank owns, and fails at `steps[0]` if it owns none."""
    load = source.function(LOAD)
    if not source.has(PADDING, within=load) and not source.has_function(_step_and_state_keys.__name__):
        source.skip_if(GUARD + STEP, within=load)  # the load does not fail; the first step creates the padding's states
    source.skip_if(GUARD + STEP, PADDING, _step_and_state_keys, within=load)
    step = source.branch(STEP, within=load)
    source.insert_at(step.test, GUARD)
    source.insert_before(source.one("hp_param = param_group['params'][0]", within=load), PADDING)
    source.insert_function_before("ZeROOptimizer", _step_and_state_keys)
