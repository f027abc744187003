"""Resume the hybrid CPU-offload optimizer exactly: pass the loaded state on to its sub-optimizers.

More than 150 lines: every load of 0.12 to 0.19 leaves out the sub-optimizers, and what has no step is refused.

https://github.com/NVIDIA/Megatron-LM/issues/1842
"""

import ast
from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NoMatch, NotNeeded, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch

HYBRID_OPTIMIZER = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/issues/1842",
        "https://github.com/NVIDIA/Megatron-LM/issues/1820",
        "https://github.com/volcengine/verl/issues/3517",
        "https://github.com/volcengine/verl/issues/4870",
        "https://github.com/NovaSky-AI/SkyRL/issues/1401",
    ),
    symptom="the loss jumps after a resume with optimizer CPU offload, or `KeyError`",
    releases=(("0.12.0", newest("megatron-core")),),
    stacks="optimizer CPU offload",
    silent=True,
    depends_on=("torch_adam_step",),
    test="tests/unit_tests/test_hybrid_offload_resume.py",
)

# Upstream's other load methods already sync.
ALWAYS, BEFORE, SINCE = (
    ("0.12.0", newest("megatron-core")),
    ("0.12.0", "0.14.0"),
    ("0.15.0", newest("megatron-core")),
)
LOADS = {  # by method, the releases that have it
    "load_parameter_state_from_dp_zero": ALWAYS,
    "load_parameter_state_from_dp_zero_legacy": ALWAYS,
    "load_parameter_state_from_fs_bucket_space": BEFORE,
    "load_parameter_state_from_dp_reshardable": SINCE,
}
LOOK_FOR_STEP = """if isinstance(self.optimizer, HybridDeviceOptimizer) and "optimizer" in state_dict:
    self._look_for_step(state_dict["optimizer"]["param_groups"])"""
SYNC = "self.optimizer._sync_hdo_state_to_sub_optimizers()"


class HybridDeviceOptimizer:
    """The methods to insert into upstream's class."""

    if TYPE_CHECKING:
        cpu_optimizer_cls: Any
        gpu_optimizer_cls: Any
        sub_optimizers: list[torch.optim.Optimizer]

    def _allow_optimizer_classes_in_checkpoints(self) -> None:
        """Allow `torch.load(weights_only=True)` to load the sub-optimizers' classes.

        The param groups in every checkpoint refer to these classes. Only those that this run is
        configured with are allowed.
        """
        if hasattr(torch.serialization, "add_safe_globals"):  # since torch 2.4
            torch.serialization.add_safe_globals([self.cpu_optimizer_cls, self.gpu_optimizer_cls])

    def _step_of_param_groups(self) -> "int | None":
        """Return the step that an optimizer keeps in its param groups, as FusedAdam does."""
        steps = {
            group.get("step")
            for optimizer in self.sub_optimizers
            for group in optimizer.param_groups
        }
        return max((int(step) for step in steps if step is not None), default=None)


class DistributedOptimizer:
    """The methods to insert into upstream's class."""

    if TYPE_CHECKING:
        _has_no_step: bool

    def _look_for_step(self, saved_groups: "list[dict[str, Any]]") -> None:
        """Remember whether the saved param groups have a step.

        Releases without this change saved no step if nothing was offloaded.
        """
        self._has_no_step = not any("step" in group for group in saved_groups)

    def _state_of_hybrid_optimizer(
        self, tensors: "dict[str, torch.Tensor]"
    ) -> "dict[str, torch.Tensor]":
        """Return the part of a parameter's loaded state that the hybrid optimizer keeps.

        It also keeps a copy of the main param. The step is loaded with the param groups, and the
        padding flag of dp_reshardable is not a state.
        Tensors are cloned, because a slice would keep the complete loaded buffer in memory.

        Raises:
            RuntimeError: the checkpoint has no step, but its moments are not zero.
        """
        moments = [value for key, value in tensors.items() if key.startswith("exp_avg")]
        if getattr(self, "_has_no_step", False) and any(bool(value.any()) for value in moments):
            raise RuntimeError(
                "expected the optimizer's step in the checkpoint, found moments that are not zeros"
                " and no step: the run saved none, with no part of the optimizer offloaded. Adam"
                " would count from 0. Load the weights alone (--no-load-optim)."
            )
        state = {
            key: value.clone()
            for key, value in tensors.items()
            if key != "step" and isinstance(value, torch.Tensor)
        }
        state.setdefault("master_param", state["param"])
        return state


@fix.edit(HYBRID_OPTIMIZER)
def copy_loaded_main_params(source: Source) -> None:
    """Upstream expects an fp32 copy of every parameter; only 16-bit ones have it, others have a CPU clone."""
    update = source.function("HybridDeviceOptimizer._update_fp32_params_by_new_state")
    source.skip_if(
        "self.param_to_inner_param[param]", "param.data.copy_(fp32_param)", within=update
    )
    # Newer code uses `get` and skips fp32 parameters, although they have a CPU clone, too.
    asked = source.all("self.param_to_fp32_param.get(param)", within=update)
    asked = asked or [source.one("self.param_to_fp32_param[param]", within=update)]
    source.replace(asked[0], "self.param_to_inner_param[param]")
    copy = source.one("fp32_param.data.copy_(v['master_param'])", within=update)
    # Initializing the state takes a step with random gradients, which changes the model's weights.
    source.insert_after(copy, "param.data.copy_(fp32_param)")


@fix.edit(HYBRID_OPTIMIZER)
def keep_sub_optimizers_steps(source: Source) -> None:
    """After a load the groups hold the loaded step; upstream resets the sub-optimizers to it at every step."""
    sync = source.function("HybridDeviceOptimizer._sync_hdo_param_groups_to_sub_optimizers")
    source.skip_if("update_group_attrs.pop('step', None)", within=sync)
    source.insert_after(
        source.one("del update_group_attrs['params']", within=sync),
        'update_group_attrs.pop("step", None)',
    )


@fix.edit(HYBRID_OPTIMIZER)
def allow_optimizer_classes(source: Source) -> None:
    """Since 0.14 a checkpoint's common state is loaded with `weights_only`."""
    init = source.function("HybridDeviceOptimizer.__init__")
    call = "self._allow_optimizer_classes_in_checkpoints()"
    methods = (
        HybridDeviceOptimizer._allow_optimizer_classes_in_checkpoints,
        HybridDeviceOptimizer._step_of_param_groups,
    )
    source.skip_if(call, *methods, within=init)
    source.insert_before(source.one("self._init_sub_optimizers()", within=init), call)
    zero_grad = source.function("HybridDeviceOptimizer.zero_grad")
    for method in methods:
        source.insert_method_before(zero_grad, method)


@fix.edit("megatron.core.optimizer.distrib_optimizer")
def sync_after_every_load(source: Source) -> None:
    """Only two of upstream's load methods pass the state on to the sub-optimizers."""
    found = (source.function_of(f"DistributedOptimizer.{name}", LOADS[name]) for name in LOADS)
    functions = [function for function in found if function is not None]
    missing = [function for function in functions if not source.all(SYNC, within=function)]
    if functions and not missing:
        raise NotNeeded
    for function in missing:
        last = function.body[-1]
        if not isinstance(last, ast.For):
            raise NoMatch(f"expected {function.name} to end with a loop over the buffers")
        source.insert_after(
            last, f"if isinstance(self.optimizer, HybridDeviceOptimizer):\n    {SYNC}"
        )


@fix.edit("megatron.core.optimizer.distrib_optimizer")
def load_into_state(source: Source) -> None:
    """Every load ends here; upstream looks up the current state's keys in the checkpoint."""
    load = source.function("DistributedOptimizer._set_main_param_and_optimizer_states")
    groups_load = source.function("DistributedOptimizer.load_state_dict")
    methods = (DistributedOptimizer._look_for_step, DistributedOptimizer._state_of_hybrid_optimizer)
    source.skip_if(
        "self._look_for_step(...)",
        ("self._state_of_hybrid_optimizer(tensors)", load),
        *methods,
        within=groups_load,
    )
    source.insert_at_start(groups_load, LOOK_FOR_STEP)
    look_up = source.one(
        "group_index, group_order = self.model_param_group_index_map[model_param]", within=load
    )
    source.insert_before(
        look_up,
        """if isinstance(self.optimizer, HybridDeviceOptimizer):
    tensors = self._state_of_hybrid_optimizer(tensors)""",
    )
    for method in methods:
        source.insert_method_before(load, method)


@fix.edit("megatron.core.optimizer.distrib_optimizer")
def save_and_load_step(source: Source) -> None:
    """Without offloading, upstream does not save FusedAdam's step, and loads a checkpoint of step 0 as step 1."""
    save, load = (
        source.function(f"DistributedOptimizer.{name}")
        for name in ("state_dict", "load_state_dict")
    )
    step = "self.optimizer._step_of_param_groups()"
    steps = 'list(set([g["step"] for g in state_dict["optimizer"]["param_groups"] if "step" in g]))'
    source.skip_if(step, (f"{steps} or [0]", load), within=save)
    of_hybrid = source.branch("isinstance(self.optimizer, HybridDeviceOptimizer)", within=save)
    source.replace(source.one("step = None", within=of_hybrid).value, step)
    source.insert_at(source.one(steps, within=load), " or [0]", end=True)
