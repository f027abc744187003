"""Load only the weights of a universal checkpoint if optimizer states are not requested, at ZeRO 1 and 2.

https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/stage_1_and_2.py#L3664
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NotNeeded, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ENGINE = "deepspeed.runtime.engine"
BASE_OPTIMIZER = "deepspeed.runtime.base_optimizer"
STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2"
BF16_OPTIMIZER = "deepspeed.runtime.bf16_optimizer"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/stage_1_and_2.py#L3664",),
    symptom="`load_optimizer_states=False` and `load_module_only=True` are ignored",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="universal load, ZeRO 1 and 2",
    silent=True,
    test="tests/unit/checkpoint/test_universal_weights_alone.py",
)

LOAD, WEIGHTS = "load_hp_checkpoint_state_from_checkpoint_dir", "load_hp_weights_from_checkpoint_dir"
LOAD_ZERO = "success = self._load_zero_checkpoint(load_dir, tag, load_optimizer_states={})"
STATES, STATES_OF_ALL = "load_optimizer_states", "load_optimizer_states and not load_module_only"
LOAD_ZERO_LINES = """success = self._load_zero_checkpoint(load_dir,
                                     tag,
                                     load_optimizer_states=load_optimizer_states
                                     and not load_module_only)"""


class ZeROOptimizer:
    """The method to insert into the class, and what it uses of its subclasses."""

    optimizer: "Any"
    load_hp_checkpoint_state_from_checkpoint_dir: "Any"
    _link_all_hp_params: "Any"

    def load_hp_weights_from_checkpoint_dir(self, lp_groups_name: str, checkpoint_dir: str) -> None:
        """Load only the fp32 parameters. Moments, steps, settings and loss scale are kept."""
        inner, own = self.optimizer, vars(self)
        of_the_scale = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
        scale = {key: value for key, value in own.items() if key in of_the_scale}
        state, settings = inner.state, [dict(group) for group in inner.param_groups]
        inner.state = {group["params"][0]: {} for group in settings}
        self.load_hp_checkpoint_state_from_checkpoint_dir(lp_groups_name, checkpoint_dir)
        inner.state = state
        for number, group in enumerate(inner.param_groups):
            group.clear()
            group.update(settings[number])
        own.update(scale)
        self._link_all_hp_params()  # the load linked the saved moments
        self._hp_optimizer_states_linked = False


@fix.edit(BASE_OPTIMIZER)
def load_weights_without_states(source: Source) -> None:
    method = ZeROOptimizer.load_hp_weights_from_checkpoint_dir
    if source.has_function(f"ZeROOptimizer.{method.__name__}"):
        raise NotNeeded
    source.insert_method_before(source.function(f"ZeROOptimizer.{LOAD}"), method)


@fix.edit(STAGE_1_AND_2, BF16_OPTIMIZER)
def ask_whether_states_are_wanted(source: Source) -> None:
    """Upstream ignores `load_optimizer_states`."""
    owner = "DeepSpeedZeroOptimizer" if b"class DeepSpeedZeroOptimizer(" in source.data else "BF16_Optimizer"
    load = source.function(f"{owner}._load_universal_checkpoint")
    call = source.one(f"self.{LOAD}(..., checkpoint_folder)", within=load)
    weights = source.text(call).replace(LOAD, WEIGHTS)
    source.skip_if(f"if not load_optimizer_states:\n    {weights}\n    return", within=load)
    source.insert_before(call, f"if not load_optimizer_states:\n    {weights}\n    return")


@fix.edit(ENGINE, independent=True, releases=(("0.15.0", "0.19.2"),))
def want_no_states_for_the_module_only(source: Source) -> None:
    """Upstream does so since 0.19.3."""
    load = source.function("DeepSpeedEngine.load_checkpoint")
    source.skip_if(LOAD_ZERO.format(STATES_OF_ALL), within=load)
    source.replace(source.one(LOAD_ZERO.format(STATES), within=load), LOAD_ZERO_LINES)
