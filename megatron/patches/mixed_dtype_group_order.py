"""Save and load each parameter's own state if a param group mixes fp32 and 16-bit parameters.

More than 150 lines: what releases saved with exchanged states loads right on as many ranks, as without the fix.

https://github.com/NVIDIA/Megatron-LM/pull/5835
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
        "https://github.com/NVIDIA/Megatron-LM/pull/5835",
        "https://github.com/NVIDIA/Megatron-LM/issues/2777",
        "https://github.com/NVIDIA/Megatron-LM/pull/2872",
    ),
    symptom="parameters resume with each other's main parameters and moments",
    releases=(("0.12.0", newest("megatron-core")),),
    stacks="a param group with fp32 and 16-bit parameters",
    silent=True,
    test="tests/unit_tests/dist_checkpointing/test_mixed_dtype_group_order.py",
)

# In the optimizer's groups, fp32 parameters come first.
REBUILT = """self.buffer_order_index_map = self.model_param_group_index_map
self.model_param_group_index_map = {
    param: (group_index, group_order)
    for group_index, (fp32_params, float16_params) in enumerate(
        zip(self.model_fp32_groups, self.model_float16_groups)
    )
    for group_order, param in enumerate([*fp32_params, *float16_params])
}"""
# Of the groups before they are sharded.
MIXED = """self.mixed_dtype_groups = {
    index
    for index, group in enumerate(self.optimizer.param_groups)
    if len({param.dtype == torch.float32 for param in group["params"]}) == 2
}"""
# Before a hybrid optimizer creates its state by a step, which changes the loaded weights.
BEFORE = "self.weights_of_checkpoint = self._weights_of_mixed_dtype_groups()"
BEFORE_FILE = """self.weights_of_checkpoint = (
    getattr(self, "weights_of_checkpoint", {}) or self._weights_of_mixed_dtype_groups()
)"""
AFTER = "self._check_states_of_mixed_dtype_groups()"
# Part of upstream's own fix (#5835), not in any release up to 0.19.2.
REPAIR = "self.model_param_group_index_map[model_param] = (group_index, group_order)"
SET = "_set_main_param_and_optimizer_states"


class DistributedOptimizer:
    """The methods to insert into upstream's class."""

    if TYPE_CHECKING:
        optimizer: Any
        buffer_order_index_map: dict[torch.nn.Parameter, tuple[int, int]]
        data_parallel_group: torch.distributed.ProcessGroup
        mixed_dtype_groups: set[int]
        model_param_group_index_map: dict[torch.nn.Parameter, tuple[int, int]]
        weights_of_checkpoint: dict[torch.nn.Parameter, torch.Tensor]

        _get_main_param_and_optimizer_states: Any
        _get_model_param_range_map: Any
        _set_main_param_and_optimizer_states: Any

    def _weights_of_mixed_dtype_groups(self) -> "dict[torch.nn.Parameter, torch.Tensor]":
        """Clone this rank's shards of unquantized weights; a load overwrites some of them."""
        weights: dict[torch.nn.Parameter, torch.Tensor] = {}
        mixed: set[int] = getattr(self, "mixed_dtype_groups", set())
        for param, (group_index, _) in self.model_param_group_index_map.items() if mixed else ():
            if group_index in mixed and type(param.data) is torch.Tensor:
                owned = self._get_model_param_range_map(param)["param"]
                weights[param] = param.data.view(-1)[owned.start : owned.end].clone()
        return weights

    def _check_states_of_mixed_dtype_groups(self) -> None:
        """Correct states that were saved with parameters in grad buffer order.

        Such a save exchanges the states of a rank's parameters. A load in the same order, on as
        many ranks, exchanges them back. Main params that round to the weights show the order.

        Raises:
            ValueError: on all ranks, if any rank cannot determine the order.
        """
        weights, self.weights_of_checkpoint = getattr(self, "weights_of_checkpoint", {}), {}
        if not getattr(self, "mixed_dtype_groups", set()):
            return
        places = self.model_param_group_index_map
        loaded = {
            param: self._get_main_param_and_optimizer_states(param)
            for param, (group_index, _) in places.items()
            if group_index in self.mixed_dtype_groups
        }
        at = {place: param for param, place in places.items()}
        exchanged = {at[self.buffer_order_index_map[param]]: loaded[param] for param in loaded}

        def are_of_weights(states: "dict[torch.nn.Parameter, dict[str, torch.Tensor]]") -> bool:
            return all(
                torch.equal(states[param]["param"].to(weight.device, weight.dtype), weight)
                for param, weight in weights.items()
                if states[param]["param"].is_floating_point()
            )

        right, swapped = are_of_weights(loaded), are_of_weights(exchanged)
        # Both fit where weights are equal, or the rank has one order: states must not differ.
        unknown = right == swapped and not (
            right
            and all(
                torch.equal(state, exchanged[param][key])
                for param, states in loaded.items()
                if states is not exchanged[param]
                for key, state in states.items()
            )
        )
        on_any_rank = torch.tensor([int(unknown)], device=torch.cuda.current_device())
        torch.distributed.all_reduce(
            on_any_rank, op=torch.distributed.ReduceOp.MAX, group=self.data_parallel_group
        )
        if on_any_rank.item():
            raise ValueError(
                "Cannot tell whose states were loaded for param groups with fp32 and 16-bit"
                " parameters. Expected main params that round to the loaded weights, as saved or"
                " with each rank's states exchanged; found on a rank neither, or both. Releases of"
                " megatron-core save them exchanged: load such a checkpoint on as many ranks as it"
                " was saved on, the weights first, and save it again."
            )
        if not right:
            copies = {
                param: {key: state.clone() for key, state in states.items()}
                for param, states in exchanged.items()
            }
            for param, states in copies.items():
                self._set_main_param_and_optimizer_states(param, states)
            if hasattr(self.optimizer, "_sync_hdo_state_to_sub_optimizers"):
                self.optimizer._sync_hdo_state_to_sub_optimizers()


METHODS = (
    DistributedOptimizer._weights_of_mixed_dtype_groups,
    DistributedOptimizer._check_states_of_mixed_dtype_groups,
)


@fix.edit("megatron.core.optimizer.distrib_optimizer")
def follow_groups(source: Source) -> None:
    """Upstream records parameters' indices in grad buffer order, but later moves the fp32 ones to the front."""
    init = source.function("DistributedOptimizer.__init__")
    load = source.function("DistributedOptimizer.load_state_dict")
    from_file = source.function("DistributedOptimizer.load_parameter_state")
    get_states = source.function("DistributedOptimizer._get_main_param_and_optimizer_states")
    set_states = source.function(f"DistributedOptimizer.{SET}")
    source.skip_if(REPAIR, within=init)
    source.skip_if(
        (MIXED, init),
        ("self.buffer_order_index_map = self.model_param_group_index_map", init),
        (BEFORE, load),
        BEFORE_FILE,
        (AFTER, load),
        AFTER,
        *METHODS,
        any(source.text(node) == "torch.no_grad()" for node in set_states.decorator_list),
        within=from_file,
    )
    ranges = source.one(
        "self.model_param_group_index_map, self.opt_group_ranges = ...", within=init
    )
    source.insert_before(ranges, MIXED)
    built = "self._build_model_and_main_param_groups(...)"
    (allocated,) = (node for node in init.body if source.has(built, within=node))
    source.insert_after(allocated, REBUILT)
    loads = source.branch("'param_state' in state_dict", within=load)
    source.insert_at_start(load, BEFORE)
    source.insert_after(loads.body[-1], AFTER)
    call = source.one("self.load_parameter_state_from_dp_zero(...)", within=from_file)
    source.insert_before(call, BEFORE_FILE)
    source.insert_after(from_file.body[-1], AFTER)
    source.decorate(set_states, "@torch.no_grad()")
    for method in METHODS:
        source.insert_method_before(get_states, method)
