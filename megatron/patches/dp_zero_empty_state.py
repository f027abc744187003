"""Save an optimizer state that is empty, or empty for some parameters, as what the optimizer would start from.

https://github.com/NVIDIA/Megatron-LM/issues/602
"""

from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import AlreadyThere, Function, NoMatch, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging

    import torch

    logger = logging.getLogger(__name__)

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/issues/602",
        "https://github.com/NVIDIA/Megatron-LM/issues/1053",
        "https://github.com/volcengine/verl/issues/4316",
        "https://github.com/volcengine/verl/issues/3517",
    ),
    affected="megatron-core 0.7.0 to 0.19.2 and main at d98e8a64dd (2026-08-22), with DistributedOptimizer",
    test="tests/unit_tests/dist_checkpointing/test_dp_zero_empty_state.py",
)

CLASS = "DistributedOptimizer"
# Where a save looks a parameter's state up: since 0.11 in the first alone, before that in each of the others.
LOOK_UP = "_get_main_param_and_optimizer_states"
OLDER_LOOK_UPS = (
    "get_parameter_state_fs_bucket_space",
    "get_parameter_state_dp_zero",
    "sharded_param_state_fs_model_space",
)
# Every save format begins in one of these.
SAVES = (
    "get_parameter_state_fs_bucket_space",
    "get_parameter_state_dp_reshardable",
    "get_parameter_state_dp_zero",
    "sharded_param_state_fs_model_space",
)

STATE_OF_SHARD = "self.optimizer.state.get(sharded_model_param, {})"
STEPS = """list(
    set([s["step"].item() for s in inner_state_dict["state"].values() if "step" in s])
) or [0.0]"""


class DistributedOptimizer:
    """The methods that upstream's class of this name gets."""

    if TYPE_CHECKING:
        optimizer: Any
        model_param_group_index_map: dict[torch.nn.Parameter, tuple[int, int]]

    def _missing_state_keys(self, state: "dict[str, torch.Tensor]") -> "list[str]":
        """Keys that the optimizer creates on a parameter's first step, and that its state lacks."""
        keys = getattr(self, "optimizer_state_keys", None)
        if keys is None:
            is_adam = all("betas" in group for group in self.optimizer.param_groups)
            keys = ("exp_avg", "exp_avg_sq") if is_adam else ()
        return [key for key in keys if key not in state]

    def _initial_optimizer_state(
        self, param: "torch.Tensor", state: "dict[str, torch.Tensor]"
    ) -> "dict[str, torch.Tensor]":
        """What the optimizer would start a parameter from, for the keys that its state lacks.

        Before the first real step (fp16 skips steps until the loss scale fits) no parameter has a
        state, and one that never steps never gets one: zero moments are the truth then.

        Args:
            param (torch.Tensor): the parameter's shard, as the inner optimizer has it.
            state (dict): its state, by key.

        Returns:
            dict: the missing moments (fp32, of the shard's shape), and the main parameter where
                the optimizer keeps it in the state.
        """
        keys = self._missing_state_keys(state)
        initial = {key: torch.zeros_like(param, dtype=torch.float32) for key in keys}
        if "master_param" in state:
            return initial
        hybrid_params = getattr(self.optimizer, "param_to_inner_param", None)
        if hybrid_params is not None:
            initial["master_param"] = hybrid_params[param]
        elif getattr(self.optimizer, "master_weights", False):
            remainders = getattr(self.optimizer, "store_param_remainders", False)
            if remainders and param.dtype == torch.bfloat16:
                initial["master_param"] = torch.zeros_like(param, dtype=torch.int16)
            else:
                initial["master_param"] = param.detach().clone().float()
        return initial

    def _saved_optimizer_state(self, param: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """A parameter's state, complete. Adds no entry to the optimizer's, as `[param]` does."""
        state = self.optimizer.state.get(param, {})
        return {**self._initial_optimizer_state(param, state), **state}

    def _warn_about_lost_state(self) -> None:
        """Name on this rank the parameters that have stepped and are saved without their state."""
        stepped = any(len(state) > 0 for state in self.optimizer.state.values()) or any(
            group.get("step", 0) > 0 for group in self.optimizer.param_groups
        )
        lost = []
        for model_param, (group_index, group_order) in self.model_param_group_index_map.items():
            param = self.optimizer.param_groups[group_index]["params"][group_order]
            state = self.optimizer.state.get(param, {})
            had_state = len(state) > 0 or (stepped and model_param.requires_grad)
            if had_state and param.numel() > 0 and self._missing_state_keys(state):
                lost.append(model_param)
        if not lost:
            return
        chunks = getattr(self, "model_chunks", [])
        names = {param: name for chunk in chunks for name, param in chunk.named_parameters()}
        shown = [names.get(p, f"a parameter of shape {tuple(p.shape)}") for p in lost[:50]]
        logger.warning(
            f"rank {torch.distributed.get_rank()}: {len(lost)} of "
            f"{len(self.model_param_group_index_map)} parameters have stepped and lack optimizer "
            f"state; the checkpoint gets initial values (zero moments) for them: "
            f"{', '.join(shown)}{', ...' if len(lost) > len(shown) else ''}"
        )


METHODS = (
    DistributedOptimizer._missing_state_keys,
    DistributedOptimizer._initial_optimizer_state,
    DistributedOptimizer._saved_optimizer_state,
)


@fix.edit("megatron.core.optimizer.distrib_optimizer")
def complete_saved_states(source: Source) -> None:
    """Every look-up of a state that is about to be saved gets what is missing in it."""
    look_ups = [LOOK_UP] if source.has_function(f"{CLASS}.{LOOK_UP}") else list(OLDER_LOOK_UPS)
    look_ups = [name for name in look_ups if source.has_function(f"{CLASS}.{name}")]
    if not look_ups:
        raise NoMatch(
            f"expected one of {', '.join((LOOK_UP, *OLDER_LOOK_UPS))} in {CLASS}, found none"
        )
    source.check_parts(
        {
            **source.functions_there(f"{CLASS}.", *METHODS),
            **calls_there(source, "self._saved_optimizer_state(...)", look_ups),
            **(
                calls_there(source, "self._initial_optimizer_state(...)", look_ups)
                if look_ups == [LOOK_UP]
                else {}
            ),
            **(calls_there(source, STATE_OF_SHARD, look_ups) if look_ups == [LOOK_UP] else {}),
            **(calls_there(source, STEPS, ["state_dict"]) if needs_step(source) else {}),
        }
    )
    for name in look_ups:
        function = source.function(f"{CLASS}.{name}")
        for state in source.some("self.optimizer.state[main_param]", within=function):
            source.replace(state, "self._saved_optimizer_state(main_param)")
    if look_ups == [LOOK_UP]:
        complete_precision_aware_state(source, source.function(f"{CLASS}.{LOOK_UP}"))
    step_of_empty_state(source)
    for method in METHODS:
        source.insert_method_before(source.function(f"{CLASS}.{look_ups[0]}"), method)


@fix.edit("megatron.core.optimizer.distrib_optimizer", ours_alone=True)
def say_what_was_lost(source: Source) -> None:
    """Upstream dies of a lost state, too; no part of a change that saves an empty one."""
    names = [name for name in SAVES if source.has_function(f"{CLASS}.{name}")]
    method = DistributedOptimizer._warn_about_lost_state
    source.check_parts(
        {
            **source.functions_there(f"{CLASS}.", method),
            **calls_there(source, "self._warn_about_lost_state()", names),
        }
    )
    if source.has_function(f"{CLASS}.{METHODS[0].__name__}"):  # upstream has taken the change
        raise AlreadyThere
    saves = [source.function(f"{CLASS}.{name}") for name in names]
    for save in saves:
        source.insert_at_start(save, "self._warn_about_lost_state()")
    source.insert_method_before(saves[0], method)


def calls_there(source: Source, call: str, methods: list[str]) -> dict[str, bool]:
    """For `check_parts`: which of these methods have a call."""
    return {
        f"{call} in {name}": source.has(call, source.function(f"{CLASS}.{name}"))
        for name in methods
    }


def needs_step(source: Source) -> bool:
    """Older releases need Apex or Transformer Engine, which keep the step in the param group."""
    return "HAVE_APEX_OR_TE" in source.text(source.function(f"{CLASS}.state_dict"))


def complete_precision_aware_state(source: Source, look_up: Function) -> None:
    """With the precision-aware optimizer the main parameter itself is in the state."""
    pop = source.one("tensors['param'] = tensors.pop('master_param')", within=look_up)
    source.insert_before(
        pop, "tensors.update(self._initial_optimizer_state(sharded_model_param, tensors))"
    )
    keys = source.some("self.optimizer.state[sharded_model_param]", within=look_up)[0]
    source.replace(keys, STATE_OF_SHARD)


def step_of_empty_state(source: Source) -> None:
    """torch's AdamW keeps `step` in the state: none is there before the first step, which is step 0."""
    if not needs_step(source):
        return
    pattern = "list(set([s['step'].item() for s in inner_state_dict['state'].values()]))"
    source.replace(source.one(pattern, within=source.function(f"{CLASS}.state_dict")), STEPS)
