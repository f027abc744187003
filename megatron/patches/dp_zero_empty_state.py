"""Save the initial optimizer state for parameters that the optimizer has not stepped yet.

More than 150 lines: it goes back to 0.9.0, the release of a report, and three kinds of optimizers have other states.

https://github.com/NVIDIA/Megatron-LM/issues/602
"""

from collections.abc import Callable
from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Function, NoMatch, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

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
LOOK_UP = "_get_main_param_and_optimizer_states"
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
STEPS = 'self._steps_of_states(inner_state_dict["state"])'
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
        """Return the state to save for a parameter: Adam's initial state if it has not stepped.

        Args:
            model_param (torch.nn.Parameter): the model's parameter.
            param (torch.Tensor): its shard in the inner optimizer.
            state (dict): the optimizer state of the shard.

        Returns:
            dict: the state, with fp32 zeros for missing moments.

        Raises:
            KeyError: moments are missing, although the parameter has stepped.
        """
        keys = self.optimizer_state_keys
        missing = [key for key in keys if key not in state]
        if not missing:
            return state
        if len(missing) < len(keys) or self._has_stepped(model_param):
            raise KeyError(
                f"{', '.join(missing)}: lost from the optimizer state of a parameter of shape"
                f" {tuple(model_param.shape)}, which has stepped; resume from an earlier checkpoint"
            )
        initial = {key: torch.zeros_like(param, dtype=torch.float32) for key in missing}
        main_param = self._initial_main_param(param)
        if main_param is not None:
            initial["master_param"] = main_param
        return {**initial, **state}

    def _has_stepped(self, model_param: "torch.nn.Parameter") -> bool:
        """Whether the optimizer has updated a parameter. A step updates all trainable ones."""
        states, groups = self.optimizer.state.values(), self.optimizer.param_groups
        return model_param.requires_grad and (
            getattr(self, "step_count", 0) > 0
            or any(group.get("step", 0) > 0 for group in groups)
            or any(key in state for state in states for key in self.optimizer_state_keys)
        )

    def _steps_of_states(self, states: "dict[int, dict[str, Any]]") -> "list[float]":
        """Return the distinct steps in the states of torch's Adam.

        There is no state before the first step, and none on a rank without parameters, such as
        those of experts on a pipeline stage that has none.

        Raises:
            KeyError: the states of parameters that have stepped are missing.
        """
        steps = {state["step"].item() for state in states.values() if state}
        if steps:
            return list(steps)
        if self.step_count > 0 and any(group["params"] for group in self.optimizer.param_groups):
            raise KeyError(
                f"step: lost from the state of all parameters, which have stepped {self.step_count}"
                " times; resume from an earlier checkpoint"
            )
        return [float(self.step_count)]

    def _initial_main_param(self, param: "torch.Tensor") -> "torch.Tensor | None":
        """Return the initial main parameter of a shard, or None if the state does not hold one.

        It is in fp32. With `store_param_remainders`, the state of a bf16 parameter holds only the
        lower 16 bits of its main parameter, as int16, which are zero at first.
        """
        if isinstance(self.optimizer, HybridDeviceOptimizer):
            return self.optimizer.param_to_inner_param[param]
        if not getattr(self.optimizer, "master_weights", False):
            return None
        if getattr(self.optimizer, "store_param_remainders", False) and (
            param.dtype == torch.bfloat16
        ):
            return torch.zeros_like(param, dtype=torch.int16)
        return param.detach().clone().float()


class WithoutHybridOffload:
    """The method for releases without HybridDeviceOptimizer and remainders."""

    if TYPE_CHECKING:
        optimizer: Any

    def _initial_main_param(self, param: "torch.Tensor") -> "torch.Tensor | None":
        """Return the initial main parameter of a shard, or None if the state does not hold one."""
        if not getattr(self.optimizer, "master_weights", False):
            return None
        return param.detach().clone().float()


class WithAdamAlone:
    """The property for releases that support only Adam; later releases have it."""

    @property
    def optimizer_state_keys(self) -> "tuple[str, ...]":
        """Keys of the tensors that a step creates in a parameter's state."""
        return ("exp_avg", "exp_avg_sq")


@fix.edit("megatron.core.optimizer.distrib_optimizer")
def complete_saved_states(source: Source) -> None:
    """Each lookup of a state to save returns the initial state for a parameter without one."""
    has_look_up = source.has_function(f"{CLASS}.{LOOK_UP}")
    look_ups = [LOOK_UP] if has_look_up else list(OLDER_LOOK_UPS)
    look_ups = [name for name in look_ups if source.has_function(f"{CLASS}.{name}")]
    if not look_ups:
        raise NoMatch(
            f"expected one of {', '.join((LOOK_UP, *OLDER_LOOK_UPS))} in {CLASS}, found none"
        )
    methods = methods_for(source)
    calls = [(SAVED_STATE, name) for name in look_ups]
    if has_look_up:
        calls += [(SAVED_SHARD, LOOK_UP), (STATE_OF_SHARD, LOOK_UP)]
    if needs_step(source):
        calls += [
            (NO_STEP, "__init__"),
            (STEPS, "state_dict"),
            (STEP_LOADED, "load_state_dict"),
            (STEP_TAKEN, "step_with_ready_grads"),
        ]
    places = [(call, source.function(f"{CLASS}.{name}")) for call, name in calls]
    found = (source.has(LOOKED_UP, source.function(f"{CLASS}.{name}")) for name in look_ups)
    has_keys = source.has_function(f"{CLASS}.optimizer_state_keys")  # upstream's, since 0.19
    source.skip_if(
        *places, *methods, *([not any(found), has_keys] if source.has(*places[0]) else [])
    )
    for name in look_ups:
        function = source.function(f"{CLASS}.{name}")
        for state in source.some(LOOKED_UP, within=function):
            source.replace(state, SAVED_STATE)
    if has_look_up:
        complete_precision_aware_state(source, source.function(f"{CLASS}.{LOOK_UP}"))
    if needs_step(source):
        step_of_empty_state(source)
    first = source.function(f"{CLASS}.{look_ups[0]}")
    if not has_keys:
        source.insert_method_before(first, keys_of_adam())
    for method in methods:
        source.insert_method_before(first, method)


def methods_for(source: Source) -> list[Callable[..., Any]]:
    """The methods to insert into the class of this release."""
    has_hybrid = source.imports("HybridDeviceOptimizer")
    of_main_param = DistributedOptimizer if has_hybrid else WithoutHybridOffload
    of_steps = [DistributedOptimizer._steps_of_states] if needs_step(source) else []
    return [
        DistributedOptimizer._saved_optimizer_state,
        DistributedOptimizer._has_stepped,
        *of_steps,
        of_main_param._initial_main_param,
    ]


def needs_step(source: Source) -> bool:
    """Whether the release supports torch's Adam: Apex and Transformer Engine keep the step in the param group."""
    return "HAVE_APEX_OR_TE" in source.text(source.function(f"{CLASS}.state_dict"))


def keys_of_adam() -> Callable[..., Any]:
    """The property's getter."""
    prop = vars(WithAdamAlone)["optimizer_state_keys"]
    assert isinstance(prop, property)
    assert prop.fget is not None
    return prop.fget


def complete_precision_aware_state(source: Source, look_up: Function) -> None:
    """With the precision-aware optimizer, the state also holds the main parameter."""
    pop = source.one("tensors['param'] = tensors.pop('master_param')", within=look_up)
    source.insert_before(pop, SAVED_SHARD)
    keys = source.some("self.optimizer.state[sharded_model_param]", within=look_up)[0]
    source.replace(keys, STATE_OF_SHARD)


def step_of_empty_state(source: Source) -> None:
    """torch's Adam keeps `step` only in the state, so a separate attribute counts the steps."""
    init, save, load, step = (
        source.function(f"{CLASS}.{name}")
        for name in ("__init__", "state_dict", "load_state_dict", "step_with_ready_grads")
    )
    source.insert_at_start(init, NO_STEP)
    pattern = "list(set([s['step'].item() for s in inner_state_dict['state'].values()]))"
    source.replace(source.one(pattern, within=save), STEPS)
    loaded = source.one("step = torch.tensor(steps[0], dtype=torch.float)", within=load)
    source.insert_after(loaded, STEP_LOADED)
    stepped = source.one("update_successful = super().step_with_ready_grads()", within=step)
    source.insert_after(stepped, STEP_TAKEN)
