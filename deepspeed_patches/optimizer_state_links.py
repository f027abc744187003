"""Link the parameters of all param groups to their moments, also after a load.

https://github.com/deepspeedai/DeepSpeed/pull/5104
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2"
BF16_OPTIMIZER = "deepspeed.runtime.bf16_optimizer"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/5104",),
    symptom="`safe_get_full_optimizer_state` fails: `exp_avg not found` or `TypeError`",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="ZeRO 1 and 2, several param groups or after a load",
    silent=False,
    test="tests/unit/runtime/zero/test_optimizer_state_links.py",
)

LINK = "self._lazy_init_hp_params_optimizer_state()"
LINK_AFTER_LAST = f"""if group_no == len(self.optimizer.param_groups) - 1:
    {LINK}"""
LINK_LOADED = f"""if all(self.optimizer.state.get(master) for master in self.{{}}):
    {LINK}"""
NOT_LINKED = "self._hp_optimizer_states_linked = False"


@fix.edit(STAGE_1_AND_2, independent=True)
def link_when_all_groups_have_stepped(source: Source) -> None:
    """Upstream links all groups only once, after the first has stepped, when the others have no moments."""
    step = source.function("DeepSpeedZeroOptimizer._optimizer_step")
    source.skip_if(LINK_AFTER_LAST, within=step)
    source.replace(source.one(LINK, within=step), LINK_AFTER_LAST)


@fix.edit(STAGE_1_AND_2, BF16_OPTIMIZER, independent=True)
def link_again_after_a_load(source: Source) -> None:
    """A load makes new links, only to the main parameters, but upstream assumes that moments are linked, too."""
    owner = "DeepSpeedZeroOptimizer" if source.has_function("DeepSpeedZeroOptimizer.step") else "BF16_Optimizer"
    link = source.function(f"{owner}._link_all_hp_params")
    source.skip_if(NOT_LINKED, within=link)
    source.insert_at_start(link, NOT_LINKED)


@fix.edit(STAGE_1_AND_2, BF16_OPTIMIZER, independent=True)
def link_right_after_a_load(source: Source) -> None:
    """Upstream waits for the next step, although the moments are already loaded."""
    at_stages = source.has_function("DeepSpeedZeroOptimizer.step")
    load = source.function(f"{'DeepSpeedZeroOptimizer' if at_stages else 'BF16_Optimizer'}._load_legacy_checkpoint")
    loaded = LINK_LOADED.format("single_partition_of_fp32_groups" if at_stages else "fp32_groups_flat_partition")
    source.skip_if(loaded, within=load)
    source.insert_after(source.one("self._link_all_hp_params()", within=load), loaded)
