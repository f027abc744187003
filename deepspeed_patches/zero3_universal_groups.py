"""Resume ZeRO-3 from a universal checkpoint with each param group's settings and a step per flat tensor.

https://github.com/deepspeedai/DeepSpeed/pull/7585
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Function, NoMatch, NotNeeded, Source

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/7585",),
    symptom="all param groups resume with the first group's settings and a wrong step",
    releases=(("0.18.0", newest("deepspeed")),),
    stacks="universal load, ZeRO 3, several param groups or `sub_group_size`",
    silent=True,
    test="tests/unit/checkpoint/test_zero3_universal_groups.py",
)

STAGE3 = "deepspeed.runtime.zero.stage3"
STEP = "self.optimizer.state[fp32_param]['step'] = state_step"
OWN_STEP = """
own_step = state_step.clone() if torch.is_tensor(state_step) else state_step
self.optimizer.state[fp32_param]['step'] = own_step
"""
OF_THE_FIRST = 'optim_sd[OPTIMIZER_STATE_DICT]["param_groups"][0].items()'
OWN_SETTINGS = """
param_groups, saved_groups = self.optimizer.param_groups, optim_sd[OPTIMIZER_STATE_DICT]["param_groups"]
if len(param_groups) != len(saved_groups):
    raise ValueError(
        f"expected {len(saved_groups)} param groups, as in {optim_state_path}, found "
        f"{len(param_groups)} in this run: which settings belong together is ambiguous; create the "
        "optimizer with the groups of the run that was saved")
for param_group, saved_group in zip(param_groups, saved_groups):
    param_group.update(saved_group)
    param_group['params'] = []
"""


@fix.edit(STAGE3, independent=True)
def count_steps_of_each_tensor(source: Source) -> None:
    """torch's optimizers increment a step tensor in place: a shared one is incremented once per flat tensor."""
    load = _load(source)
    source.skip_if(OWN_STEP.splitlines()[-1], within=load)
    source.replace(source.one(STEP, within=load), OWN_STEP)


@fix.edit(STAGE3, independent=True)
def restore_the_settings_of_each_group(source: Source) -> None:
    """Upstream gives all groups the first group's settings."""
    load = _load(source)
    source.skip_if("param_group.update(saved_group)", within=load)
    groups = source.loop("param_group", within=load)
    settings = source.loop("key, value", within=groups)
    source.one("param_group[key] = value", within=settings)
    if groups.body != [settings] or settings.iter is not source.one(OF_THE_FIRST, within=groups):
        raise NoMatch(f"expected `for key, value in {OF_THE_FIRST}` alone in the loop over the param groups")
    source.replace(groups, OWN_SETTINGS)


def _load(source: Source) -> Function:
    """The load of the optimizer's state. Up to 0.17.6 torch loads it, with the groups."""
    name = "load_hp_checkpoint_state_from_checkpoint_dir_stage3"
    load = source.function(f"DeepSpeedZeroOptimizer_Stage3.{name}")
    if source.has("self.optimizer.load_state_dict(...)", within=load):
        raise NotNeeded
    return load
