"""Convert and load fused AutoTP layers (`shape: [3, -1]`) and their biases by sub-parameter width.

https://github.com/deepspeedai/DeepSpeed/pull/8185
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NoMatch, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import torch


LAYERS = "deepspeed.module_inject.layers"
CONVERTER = "deepspeed.checkpoint.ds_to_universal"
LOADER = "deepspeed.checkpoint.universal_checkpoint"


fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/8185",),
    symptom="fused layers (qkv, gate_up) are converted and loaded in another order",
    releases=(("0.18.9", "0.19.5"),),
    stacks="universal checkpoints, AutoTP with `shape: [3, -1]` or fused biases",
    silent=True,
)

MATCHED = "matched_sub_params_shape = get_matched_sub_params_pattern(name)"
PARTITION_DIM = "partition_dim = matched_sub_params_shape.partition_dim"
WITH_WIDTHS = "matched_sub_params_shape = _with_widths(matched_sub_params_shape, slices, name)"
OF_WEIGHT = "get_matched_sub_params_pattern(weight)"
WITHOUT_RULE = """
if name.endswith(".bias") and tp_degree > 1 and matched_sub_params_shape is None:
    weight = name[:-len("bias")] + "weight"
    if get_matched_sub_params_pattern(weight) and not get_matched_pattern(replicated_parameters, name):
        raise ValueError(f"the checkpoint does not state how {name} is cut, though {weight} is fused; "
                         "resume on the same ranks and convert what that run saves")
"""
CUT = "sub_param_shape is not None and partition_dim is not None"
BY_SIZES = "sub_param_shape is not None and sub_param_sizes is None"
SHAPE_OF_BIAS = """
if sub_param_shape is not None and conversion_meta.get('is_bias', False):
    sub_param_shape = sub_param_shape[:1]
"""


def _with_widths(sub_params: "Any", slices: "Sequence[torch.Tensor]", name: str) -> "Any":
    """Replace a number of sub-parameters in the metadata, as in (3, -1), by their widths."""
    shape, dim = list(sub_params.shape), sub_params.partition_dim
    if isinstance(shape[dim], tuple):
        return sub_params
    size = sum(s.shape[dim] for s in slices) if len(shape) == slices[0].dim() else 0
    count = shape[dim]
    if count == size:  # one sub-parameter, of this width
        return sub_params
    if size == 0 or count < 1 or size % (count * len(slices)) != 0:
        found = [tuple(s.shape) for s in slices]
        raise ValueError(f"{name}: expected slices of {count} sub-parameters of equal width, found {found}")
    shape[dim] = tuple([size // count] * count)
    return type(sub_params)(patterns=sub_params.patterns, shape=tuple(shape), partition_dim=dim)


@fix.edit(LAYERS)
def describe_biases(source: Source) -> None:
    """A bias is partitioned like its weight, but upstream describes only the weight."""
    if b"sub_param_shard_widths" in source.data:
        raise NoMatch("expected layers described by counts, found widths")  # since 0.19.6
    collect = source.function("collect_autotp_universal_checkpoint_info")
    source.skip_if(CUT, "sub_param_shape = sub_param_shape[:1]", within=collect)
    described = source.branch(
        f"{CUT} and not conversion_meta.get('is_bias', False)",
        within=collect,
    )
    source.replace(described.test, CUT)
    source.insert_before(described, SHAPE_OF_BIAS)


@fix.edit(CONVERTER)
def merge_by_widths(source: Source) -> None:
    """Upstream treats the number of sub-parameters as a width."""
    merge = source.function("merge_tp_slices")
    source.skip_if(WITH_WIDTHS, OF_WEIGHT, _with_widths, within=merge)
    source.insert_after(source.one(MATCHED, within=merge), WITHOUT_RULE)
    source.insert_after(source.one(PARTITION_DIM, within=merge), WITH_WIDTHS)
    source.insert_function_before(merge, _with_widths)


@fix.edit(LOADER)
def load_by_widths(source: Source) -> None:
    """A parameter has its widths, but upstream checks the number of sub-parameters first."""
    load = source.function("_resolve_autotp_partition")
    source.skip_if(BY_SIZES, within=load)
    by_shape = source.branch("sub_param_shape is not None", within=load)
    source.replace(by_shape.test, BY_SIZES)
