"""Keep the padding flag of the dp-reshardable formats out of the optimizer's state.

https://github.com/NVIDIA/Megatron-LM/pull/2576
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NoMatch, Source

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/pull/2576",
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/1730",
    ),
    symptom="`'bool' object has no attribute 'dtype'` or `KeyError: 'padding'` at a resume",
    releases=(("0.12.0", "0.16.1"),),
    stacks="dp_reshardable format, precision-aware optimizer",
    silent=False,
)

LOADS = ("load_parameter_state_from_fs_bucket_space", "load_parameter_state_from_dp_reshardable")


@fix.edit("megatron.core.optimizer.distrib_optimizer")
def drop_padding_flag(source: Source) -> None:
    """Each saved shard has a key `padding`, which the precision-aware optimizer treats as a state."""
    pattern = "self._set_main_param_and_optimizer_states(model_param, src_tensors)"
    methods = [f"DistributedOptimizer.{name}" for name in LOADS]
    functions = [source.function(method) for method in methods if source.has_function(method)]
    affected = [function for function in functions if source.all(pattern, within=function)]
    if not affected:
        raise NoMatch(f"expected `{pattern}` in one of {', '.join(methods)}, found none")
    states = source.function("DistributedOptimizer._set_main_param_and_optimizer_states")
    source.skip_if(
        "if not isinstance(v, torch.Tensor):\n    continue", within=states
    )  # it skips all values that are not tensors
    drop = 'src_tensors.pop("padding", None)'
    source.skip_if(*((drop, function) for function in affected))
    for function in affected:
        source.insert_before(source.one(pattern, within=function), drop)
