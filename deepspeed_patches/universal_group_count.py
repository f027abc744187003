"""Refuse a universal checkpoint whose number of param groups differs from the run's, at ZeRO 1 and 2.

https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/base_optimizer.py#L299
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

BASE_OPTIMIZER = "deepspeed.runtime.base_optimizer"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/base_optimizer.py#L299",),
    symptom="parameters stay at their initial values, or resume with other settings",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="universal load, ZeRO 1 and 2, another number of param groups",
    silent=True,
    test="tests/unit/checkpoint/test_universal_group_count.py",
)

LOAD = "ZeROOptimizer.load_hp_checkpoint_state_from_checkpoint_dir"
# The number of expert groups depends on the number of experts per rank.
CHECK = """
param_groups, saved_groups = self.optimizer.param_groups, optim_sd["param_groups"]
if len(param_groups) != len(saved_groups) and not any(group.get("moe") for group in saved_groups):
    raise ValueError(
        f"expected {len(saved_groups)} param groups, as in {optim_state_path}, found {len(param_groups)} "
        "in this run: which parameters and settings belong together is ambiguous; make the optimizer "
        "with the groups of the run that was saved")
"""
DIFFERENT = CHECK.strip().partition("\n")[2].partition(":")[0].removeprefix("if ")


@fix.edit(BASE_OPTIMIZER)
def compare_the_numbers_of_groups(source: Source) -> None:
    """Upstream iterates over pairs of groups, and ignores groups without a counterpart."""
    load = source.function(LOAD)
    source.skip_if(DIFFERENT, within=load)
    source.insert_after(source.one("self._load_global_state(optim_sd)", within=load), CHECK)
