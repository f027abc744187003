"""Resume the hybrid CPU-offload optimizer exactly: pass the loaded state on to its sub-optimizers.

https://github.com/NVIDIA/Megatron-LM/issues/1842
"""

import ast

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NoMatch, Source

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

# Upstream's other load methods already sync. The last one has two names: up to 0.14, and since.
LOADS = ("dp_zero", "dp_zero_legacy")
BUCKET_LOADS = ("fs_bucket_space", "dp_reshardable")
SYNC = "self.optimizer._sync_hdo_state_to_sub_optimizers()"
ALLOW_CLASSES = """if hasattr(torch.serialization, "add_safe_globals"):  # since torch 2.4
    # Checkpoints are loaded with `weights_only`, and their param groups refer to these.
    torch.serialization.add_safe_globals([cpu_optimizer_cls, gpu_optimizer_cls])"""
# FusedAdam has the step in its param groups.
STEP = """groups = [group for one in self.optimizer.sub_optimizers for group in one.param_groups]
steps = [group["step"] for group in groups if group.get("step") is not None]
step = max(map(int, steps), default=None)"""
STEPS = """steps = list(
    set([g["step"] for g in state_dict["optimizer"]["param_groups"] if "step" in g])
)"""
# Releases without this change saved no step if nothing was offloaded.
LOADED_STEPS = """self._has_no_step = not steps
steps = steps or [0]"""
OWN_STATE = """if isinstance(self.optimizer, HybridDeviceOptimizer):
    tensors = self._state_of_hybrid_optimizer(tensors)"""


class DistributedOptimizer:
    """The methods to insert into upstream's class."""

    if TYPE_CHECKING:
        _has_no_step: bool

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
def load_into_sub_optimizers(source: Source) -> None:
    """Upstream expects an fp32 copy of every parameter; only 16-bit ones have it, others have a CPU clone.

    After a load the groups hold the loaded step; upstream resets the sub-optimizers to it at every step.
    """
    init = source.function("HybridDeviceOptimizer.__init__")
    update = source.function("HybridDeviceOptimizer._update_fp32_params_by_new_state")
    sync = source.function("HybridDeviceOptimizer._sync_hdo_param_groups_to_sub_optimizers")
    own_copy, copied = "self.param_to_inner_param[param]", "param.data.copy_(fp32_param)"
    without_step = 'update_group_attrs.pop("step", None)'
    allowed = "torch.serialization.add_safe_globals(...)"
    source.skip_if(own_copy, copied, (without_step, sync), (allowed, init), within=update)
    # Newer code uses `get` and skips fp32 parameters, although they have a CPU clone, too.
    asked = source.all("self.param_to_fp32_param.get(param)", within=update)
    asked = asked or [source.one("self.param_to_fp32_param[param]", within=update)]
    source.replace(asked[0], own_copy)
    copy = source.one("fp32_param.data.copy_(v['master_param'])", within=update)
    # Initializing the state takes a step with random gradients, which changes the model's weights.
    source.insert_after(copy, copied)
    source.insert_after(source.one("del update_group_attrs['params']", within=sync), without_step)
    source.insert_before(source.one("self._init_sub_optimizers()", within=init), ALLOW_CLASSES)


@fix.edit("megatron.core.optimizer.distrib_optimizer")
def save_and_load_step_and_state(source: Source) -> None:
    """Every load sets states one by one; upstream looks up the current state's keys in the checkpoint.

    Only two of its load methods pass the states on. Without offloading, it does not save FusedAdam's step, and loads a
    checkpoint of step 0 as step 1.
    """
    name = "DistributedOptimizer.load_parameter_state_from_"
    buckets = next((n for n in BUCKET_LOADS if source.has_function(name + n)), BUCKET_LOADS[-1])
    loads = [source.function(name + load) for load in (*LOADS, buckets)]
    save, load, set_states = (
        source.function(f"DistributedOptimizer.{name}")
        for name in ("state_dict", "load_state_dict", "_set_main_param_and_optimizer_states")
    )
    method = DistributedOptimizer._state_of_hybrid_optimizer
    source.skip_if(
        *((SYNC, function) for function in loads),
        (STEP.splitlines()[-1], save),
        ("self._has_no_step = not steps", load),
        (OWN_STATE, set_states),
        method,
    )
    for function in loads:
        last = function.body[-1]
        if not isinstance(last, ast.For):
            raise NoMatch(f"expected {function.name} to end with a loop over the buffers")
        sync = f"if isinstance(self.optimizer, HybridDeviceOptimizer):\n    {SYNC}"
        source.insert_after(last, sync)
    of_hybrid = source.branch("isinstance(self.optimizer, HybridDeviceOptimizer)", within=save)
    source.replace(source.one("step = None", within=of_hybrid), STEP)
    source.insert_after(source.one(STEPS, within=load), LOADED_STEPS)
    group = "group_index, group_order = self.model_param_group_index_map[model_param]"
    source.insert_before(source.one(group, within=set_states), OWN_STATE)
    source.insert_method_before(set_states, method)
