"""Save the initial optimizer state for parameters that the optimizer has not stepped yet.

https://github.com/NVIDIA/Megatron-LM/issues/602
"""

from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/issues/602",
        "https://github.com/NVIDIA/Megatron-LM/issues/1053",
        "https://github.com/volcengine/verl/issues/4316",
        "https://github.com/volcengine/verl/issues/3517",
    ),
    symptom="`KeyError: 'exp_avg'` in a save before the first real step",
    releases=(("0.9.0", newest("megatron-core")),),
    stacks="distributed optimizer, every format",
    silent=False,
    test="tests/unit_tests/dist_checkpointing/test_dp_zero_empty_state.py",
)

CLASS = "DistributedOptimizer"
# The methods in which a save looks up a parameter's state: since 0.11 the first, before that the others.
LOOK_UP = ("_get_main_param_and_optimizer_states",)
OLDER_LOOK_UPS = (
    "get_parameter_state_fs_bucket_space",
    "get_parameter_state_dp_zero",
    "sharded_param_state_fs_model_space",
)
LOOKED_UP = "self.optimizer.state[main_param]"
STATE_OF_SHARD = "self.optimizer.state.get(sharded_model_param, {})"
SAVED_SHARD = "tensors = self._saved_optimizer_state(model_param, sharded_model_param, tensors)"
SAVED_STATE = """self._saved_optimizer_state(
    model_param, main_param, self.optimizer.state.get(main_param, {})
)"""
# Since 0.19, upstream has a property for that.
ADAM_KEYS = 'self.optimizer_state_keys = ("exp_avg", "exp_avg_sq")'
# torch's Adam has the step in the states alone.
STEPS_FOUND = "list(set([s['step'].item() for s in inner_state_dict['state'].values()]))"
STEPS = """list(
    set([s["step"].item() for s in inner_state_dict["state"].values() if s])
) or [self._step_without_states()]"""
NO_STEP = "self.step_count = 0"
STEP_TAKEN = "self.step_count += 1"
STEP_LOADED = "self.step_count = int(steps[0])"


class DistributedOptimizer:
    """The methods to insert into upstream's class."""

    if TYPE_CHECKING:
        optimizer: Any
        optimizer_state_keys: tuple[str, ...]
        step_count: int

    def _saved_optimizer_state(
        self, model_param: "torch.nn.Parameter", param: "torch.Tensor", state: "dict[str, Any]"
    ) -> "dict[str, Any]":
        """Return the state to save for `param`, the inner optimizer's shard of a model's parameter.

        It is the initial state if the parameter has not stepped.

        Raises:
            KeyError: moments are missing, although the parameter has stepped.
        """
        keys = self.optimizer_state_keys
        missing = [key for key in keys if key not in state]
        if not missing:
            return state
        has_stepped = model_param.requires_grad and (  # a step updates all of these
            self.step_count > 0
            or any(group.get("step", 0) > 0 for group in self.optimizer.param_groups)
            or any(key in other for other in self.optimizer.state.values() for key in keys)
        )
        if has_stepped or len(missing) < len(keys):
            raise KeyError(
                f"{', '.join(missing)}: lost from the optimizer state of a parameter of shape"
                f" {tuple(model_param.shape)}, which has stepped; resume from an earlier checkpoint"
            )
        initial = {key: torch.zeros_like(param, dtype=torch.float32) for key in missing}
        if hasattr(self.optimizer, "param_to_inner_param"):  # with CPU offload
            initial["master_param"] = self.optimizer.param_to_inner_param[param]
        elif getattr(self.optimizer, "master_weights", False):
            initial["master_param"] = param.detach().clone().float()
            has_remainders = getattr(self.optimizer, "store_param_remainders", False)
            if has_remainders and param.dtype == torch.bfloat16:  # its lower 16 bits
                initial["master_param"] = torch.zeros_like(param, dtype=torch.int16)
        return {**initial, **state}

    def _step_without_states(self) -> float:
        """Return the step of torch's Adam without a state: before a step, or without parameters."""
        if self.step_count > 0 and any(group["params"] for group in self.optimizer.param_groups):
            raise KeyError(
                f"step: lost from the state of all parameters, which have stepped {self.step_count}"
                " times; resume from an earlier checkpoint"
            )
        return float(self.step_count)


METHODS = (DistributedOptimizer._saved_optimizer_state, DistributedOptimizer._step_without_states)


@fix.edit("megatron.core.optimizer.distrib_optimizer")
def complete_saved_states(source: Source) -> None:
    """Each lookup of a state to save returns the initial state for a parameter without one."""
    is_one = source.has_function(f"{CLASS}.{LOOK_UP[0]}")
    names = LOOK_UP if is_one else OLDER_LOOK_UPS
    look_ups = [source.function(f"{CLASS}.{name}") for name in names]
    init, save, load, step = (
        source.function(f"{CLASS}.{name}")
        for name in ("__init__", "state_dict", "load_state_dict", "step_with_ready_grads")
    )
    in_releases = ("0.19.2", newest("megatron-core"))
    has_keys = source.function_of(f"{CLASS}.optimizer_state_keys", in_releases) is not None
    of_shard = [(SAVED_SHARD, look_ups[0]), (STATE_OF_SHARD, look_ups[0])] if is_one else []
    source.skip_if(
        *((SAVED_STATE, look_up) for look_up in look_ups),
        *of_shard,
        *((NO_STEP, init), (STEPS, save), (STEP_LOADED, load), (STEP_TAKEN, step)),
        *(() if has_keys else ((ADAM_KEYS, init),)),
        *METHODS,
        not any(source.has(LOOKED_UP, look_up) for look_up in look_ups),
    )
    for look_up in look_ups:
        for state in source.some(LOOKED_UP, within=look_up):
            source.replace(state, SAVED_STATE)
    if is_one:  # with the precision-aware optimizer, the state also has the main parameter
        pop = source.one("tensors['param'] = tensors.pop('master_param')", within=look_ups[0])
        source.insert_before(pop, SAVED_SHARD)
        shard = source.some("self.optimizer.state[sharded_model_param]", within=look_ups[0])[0]
        source.replace(shard, STATE_OF_SHARD)
    source.insert_at_start(init, NO_STEP if has_keys else f"{NO_STEP}\n{ADAM_KEYS}")
    source.replace(source.one(STEPS_FOUND, within=save), STEPS)
    loaded = source.one("step = torch.tensor(steps[0], dtype=torch.float)", within=load)
    source.insert_after(loaded, STEP_LOADED)
    source.insert_at_start(step, STEP_TAKEN)
    for method in METHODS:
        source.insert_method_before(look_ups[0], method)
