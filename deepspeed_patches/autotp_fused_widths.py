"""Load fused AutoTP layers (`shape: [3, -1]`) by the widths of their parts, and describe their biases.

https://github.com/deepspeedai/DeepSpeed/pull/8185
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NoMatch, Source

LAYERS = "deepspeed.module_inject.layers"
LOADER = "deepspeed.checkpoint.universal_checkpoint"


fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/8185",),
    symptom="fused layers (qkv, gate_up) are converted and loaded in another order",
    releases=(("0.18.9", "0.19.5"),),
    stacks="universal checkpoints, AutoTP with `shape: [3, -1]` or fused biases",
    silent=True,
)

CUT = "sub_param_shape is not None and partition_dim is not None"
BY_SIZES = "sub_param_shape is not None and sub_param_sizes is None"
SHAPE_OF_BIAS = """
if sub_param_shape is not None and conversion_meta.get('is_bias', False):
    sub_param_shape = sub_param_shape[:1]
"""


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


@fix.edit(LOADER)
def load_by_widths(source: Source) -> None:
    """A parameter has its widths, but upstream checks the number of sub-parameters first."""
    load = source.function("_resolve_autotp_partition")
    source.skip_if(BY_SIZES, within=load)
    by_shape = source.branch("sub_param_shape is not None", within=load)
    source.replace(by_shape.test, BY_SIZES)
