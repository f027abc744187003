"""Link and convert parameters at their offsets in the flat buffer with `round_robin_gradients`.

https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/stage_1_and_2.py#L841
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NotNeeded, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import itertools
    from typing import Any

    SINGLE_PARTITION_OF_FP32_GROUPS, PARAM_SHAPES = "single_partition_of_fp32_groups", "param_shapes"

STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2"
CONVERTER = "deepspeed.checkpoint.ds_to_universal"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/stage_1_and_2.py#L841",),
    symptom="links, conversions and universal loads take other parameters' data",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="ZeRO 1 and 2 with `round_robin_gradients`",
    silent=True,
    test="tests/unit/checkpoint/test_round_robin_links.py",
)

GIVEN, IN_ORDER = "self.bit16_groups[i]", "self.round_robin_bit16_groups[i]"
FROM_FILE = "param_slice_mappings = optim_sd[PARAM_SLICE_MAPPINGS]"
OF_THE_BUFFER = """if param_shapes:
    param_slice_mappings = _slice_mappings_in_buffer_order(param_shapes[pp_index, tp_index], optim_sd, dp_index,
                                                           ds_checkpoint.dp_degree)"""
WORK = "partial(extract_zero_shards, temp_dir, ds_checkpoint)"
WORK_WITH_SHAPES = "partial(extract_zero_shards, temp_dir, ds_checkpoint, param_shapes=param_shapes)"
SHAPES = "param_shapes = _param_shapes_of_round_robin(ds_checkpoint)"


def _param_shapes_of_round_robin(ds_checkpoint: "Any") -> "dict[tuple[int, int], list[dict[str, Any]]]":
    """Return the param shapes by group of each (pipeline, tensor) rank, in flat buffer order.

    Empty without `round_robin_gradients`: `param_slice_mappings` is already in this order.
    """
    param_shapes = {}
    for ranks in itertools.product(range(ds_checkpoint.pp_degree), range(ds_checkpoint.tp_degree)):
        sd = ds_checkpoint.get_2d_parallel_state(pp_index=ranks[0], tp_index=ranks[1])
        config = sd.get("ds_config")  # a file path if the engine was given one
        zero_config = config.get("zero_optimization") if isinstance(config, dict) else None
        if not isinstance(config, str) and not (zero_config or {}).get("round_robin_gradients"):
            return {}
        param_shapes[ranks] = sd[PARAM_SHAPES]
    return param_shapes


def _slice_mappings_in_buffer_order(
    param_shapes: "list[dict[str, Any]]", optim_sd: "dict[str, Any]", dp_index: int, dp_degree: int
) -> "Any":
    """Return the addresses of a rank's parameters in its flat partitions.

    With `round_robin_gradients`, the saved addresses may be in param group order.
    """
    from deepspeed.utils.tensor_fragment import fragment_address

    paddings = optim_sd.get("param_alignment_paddings") or [[] for _ in param_shapes]
    mappings = []
    for group, shapes in enumerate(param_shapes):
        if any(paddings[group]):  # the group's addresses are already in flat buffer order
            mappings.append(optim_sd["param_slice_mappings"][group])
            continue
        partition = optim_sd[SINGLE_PARTITION_OF_FP32_GROUPS][group]
        numels = {name: shape.numel() for name, shape in shapes.items()}
        size = 2 * -(-sum(numels.values()) // (2 * dp_degree))  # a multiple of two elements
        begin, offset, mapping = dp_index * size, 0, {}
        for name, numel in numels.items():
            low, high = max(offset, begin), min(offset + numel, begin + size)
            if low < high:
                mapping[name] = fragment_address(numel=high - low, start=low - begin)
            offset += numel
        owned = sum(fragment.numel for fragment in mapping.values())
        if not owned <= partition.numel() <= size:
            where = f"param group {group} on data-parallel rank {dp_index} of {dp_degree}"
            raise ValueError(f"expected {owned} to {size} elements of {where}, found {partition.numel()}")
        mappings.append(mapping)
    return mappings


@fix.edit(STAGE_1_AND_2, independent=True)
def link_in_the_order_of_the_buffer(source: Source) -> None:
    """Upstream assumes that the buffer has the parameters in the order of the param group."""
    link = source.function("DeepSpeedZeroOptimizer._link_all_hp_params")
    given = source.all(GIVEN, within=link)
    if not given and source.has(IN_ORDER, within=link):
        raise NotNeeded
    for node in given or [source.one(GIVEN, within=link)]:
        source.replace(node, IN_ORDER)


@fix.edit(CONVERTER, independent=True, upstream_alone=True)
def convert_in_the_order_of_the_buffer(source: Source) -> None:
    """Existing checkpoints have addresses in the param group's order, but shapes in the buffer's order.

    Here, `universal_converter` hands over to a converter that knows this.
    """
    extract, extract_all = source.function("extract_zero_shards"), source.function("_extract_zero_shard_files")
    functions = (_param_shapes_of_round_robin, _slice_mappings_in_buffer_order)
    has_parameter = any(argument.arg == "param_shapes" for argument in extract.args.args)
    source.skip_if((OF_THE_BUFFER, extract), SHAPES, WORK_WITH_SHAPES, has_parameter, *functions, within=extract_all)
    source.insert_after(source.one(FROM_FILE, within=extract), OF_THE_BUFFER)
    source.add_parameter(extract, "param_shapes=None")
    source.insert_before(source.one(f"do_work = {WORK}", within=extract_all), SHAPES)
    source.add_keyword(source.one(WORK, within=extract_all), "param_shapes", "param_shapes")
    for function in functions:
        source.insert_function_before(extract, function)
