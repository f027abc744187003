"""Save SwiGLU's W and V rows at their correct offsets under torch FSDP2, and detect checkpoints that mix them.

More than 150 lines: what releases saved with mixed rows loads right on as many ranks, as without the fix.

https://github.com/NVIDIA/Megatron-LM/issues/5714
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NoMatch, Part, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

UTILS = "megatron.core.utils"


fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/Megatron-LM/issues/5714",),
    symptom="the loss jumps on other ranks: rows of SwiGLU's W and V change places",
    releases=(("0.12.0", newest("megatron-core")),),
    stacks="torch FSDP2 (`--use-torch-fsdp2`), SwiGLU or another gated MLP",
    silent=True,
    test="tests/unit_tests/dist_checkpointing/test_fsdp2_swiglu_rows.py",
)

SIZE = "fsdp2_dp_size"
GRID = "fsdp2_grid"
HALVES = "fsdp2_halves"


def _fsdp2_swiglu_build_fn(
    original_sh_ten: "ShardedTensor", sharded_offsets: "tuple[Any, ...]", dp_size: int
) -> "Any":
    """Return the build function for a data-parallel shard of the rows of [W; V].

    A shard within W or V becomes one ShardedTensor. With an odd number of shards, the middle one
    spans both, so each shard becomes two ShardedTensors of the same number of rows.
    """
    axis = len(sharded_offsets)
    num_shards = original_sh_ten.axis_fragmentations[axis]
    shard = original_sh_ten.global_offset[axis] // original_sh_ten.local_shape[0]
    tp_size = num_shards // dp_size
    tp_rank, dp_rank = divmod(shard, dp_size)
    num_pieces = 1 + dp_size % 2
    pieces_of_half = num_pieces * dp_size // 2

    def build_fn(key: str, t: "Any", replica_id: "Any", flattened_range: "slice | None") -> "Any":
        assert flattened_range is None, f"{key}: FSDP2 does not flatten parameters"
        with torch.no_grad():
            pieces = torch.chunk(t, num_pieces)
        sh_tens = []
        for number, piece in enumerate(pieces):
            half, place = divmod(num_pieces * dp_rank + number, pieces_of_half)
            place += pieces_of_half * (tp_size * half + tp_rank)
            sh_tens.append(
                ShardedTensor.from_rank_offsets(
                    key,
                    piece,
                    *sharded_offsets,
                    (axis, place, num_pieces * num_shards),
                    replica_id=replica_id,
                    prepend_axis_num=axis,
                )
            )
        return sh_tens

    return build_fn


def mixed_swiglu_grid(metadata: "Any", key: str) -> "tuple[int, int] | None":
    """Return the sizes of the run that mixed the rows of W and V, or None if they are in place.

    Earlier releases split each torch FSDP2 shard in half, and saved it as rows of W and of V.

    Args:
        metadata (Metadata): metadata of the checkpoint.
        key (str): key of a `linear_fc1` weight or bias, or of its optimizer state.

    Returns:
        Tuple[int, int]: tensor-parallel and data-parallel sizes of that run.

    Raises:
        CheckpointingException: the metadata does not show whether the rows are mixed.
    """
    import re

    from megatron.core.dist_checkpointing.core import CheckpointingException

    tensors = metadata.state_dict_metadata
    chunks = tensors[key].chunks
    axis = len(tensors[key].size) - (1 if key.endswith("bias") else 2)
    rows = sorted({chunk.offsets[axis] for chunk in chunks})
    if len(rows) % 2 or len(rows) == 2:
        return None
    beside = re.sub("(weight|bias)$", "weight", key.replace("linear_fc1", "linear_fc2"))
    while "." in beside and beside not in tensors:
        beside = beside.partition(".")[2]  # a frozen parameter has no optimizer state
    if beside not in tensors or beside == key:
        raise CheckpointingException(
            f"Cannot tell whether the rows of W and V are in place in {key}: expected beside it"
            " linear_fc2, of which each data-parallel shard is a chunk. Load the checkpoint with"
            " the code that has saved it."
        )
    dp_size, tp_size = (
        len({chunk.offsets[axis + other] for chunk in tensors[beside].chunks}) for other in (0, 1)
    )
    if dp_size == 1 or len(rows) != 2 * dp_size * tp_size:
        return None
    if dp_size % 2 == 0:  # rows in place: each shard is one chunk
        return tp_size, dp_size

    writers = {
        tuple(index.offset): stored.relative_path.rpartition("_")[0]
        for index, stored in metadata.storage_data.items()
        if index.fqn == key
    }
    before, behind = (
        tuple(chunks[0].offsets[part]) for part in (slice(axis), slice(axis + 1, None))
    )
    first, second, first_of_v = (
        writers.get((*before, rows[number], *behind)) for number in (0, 1, len(rows) // 2)
    )
    if first == second != first_of_v:
        return None
    if first == first_of_v != second:
        return tp_size, dp_size
    raise CheckpointingException(
        f"Cannot tell whether the rows of W and V are in place in {key}: expected its first chunk"
        f" and one other in files of one rank, found {first}, {second} and {first_of_v}."
    )


def mixed_swiglu_rows_error(key: str, grid: "tuple[int, int]", found: str) -> Exception:
    """Return the error for mixed rows of W and V that this run cannot load as saved."""
    from megatron.core.dist_checkpointing.core import CheckpointingException

    error: Exception = CheckpointingException(
        f"The rows of W and V are mixed in {key}, as a save under torch FSDP2 filed them before"
        " Megatron-LM#5714 was fixed: expected a load under FSDP2 with the sizes of that save,"
        f" tensor-parallel {grid[0]} and data-parallel {grid[1]}, found {found}. Load it so and"
        " save it again, or put the rows of the checkpoint in place first."
    )
    return error


def check_swiglu_rows(metadata: "Any", sharded_tensors: "list[ShardedTensor]") -> None:
    """Raise if a run without FSDP2 requests mixed rows as rows of W and V.

    A run with FSDP2 requests them as they were saved.

    Raises:
        CheckpointingException: the rows are mixed.
    """
    by_key = {sh_ten.key: sh_ten for sh_ten in sharded_tensors}
    for key, sh_ten in by_key.items():
        beside = key.replace("linear_fc1", "linear_fc2")
        if (
            not key.endswith("linear_fc1.weight")
            or beside not in metadata.state_dict_metadata
            or getattr(sh_ten, "flattened_range", None) is not None
        ):
            continue
        grid = mixed_swiglu_grid(metadata, key)
        axis = len(sh_ten.global_shape) - 2
        if grid is None or sh_ten.axis_fragmentations is None:
            continue
        if beside in by_key:
            as_saved = by_key[beside].axis_fragmentations[axis] == grid[1]
        else:
            as_saved = sh_ten.axis_fragmentations[axis] == 2 * grid[0] * grid[1]
        if not as_saved:
            raise mixed_swiglu_rows_error(key, grid, "one without FSDP2")


def with_swiglu_rows_as_saved(sharded_state_dict: "Any", checkpoint_dir: "Any") -> "Any":
    """Request mixed rows of W and V at their saved offsets, if this run has the same sizes.

    Raises:
        CheckpointingException: the sizes differ, or it is unknown whether rows are mixed.
    """
    from dataclasses import replace

    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist

    of_fsdp2 = {
        value.key: value.build_fn.fsdp2_grid
        for value in nested_values(sharded_state_dict)
        if hasattr(getattr(value, "build_fn", None), "fsdp2_grid")
    }
    if not of_fsdp2:
        return sharded_state_dict
    reader = getattr(torch_dist, "_get_filesystem_reader", torch_dist.FileSystemReader)
    try:
        metadata = reader(checkpoint_dir).read_metadata()
    except FileNotFoundError as error:
        raise CheckpointingException(
            f"Cannot tell whether the rows of W and V are in place in {checkpoint_dir}: expected"
            " .metadata of torch_dist."
        ) from error
    mixed = set()
    for key in of_fsdp2.keys() & metadata.state_dict_metadata.keys():
        grid = torch_dist.mixed_swiglu_grid(metadata, key)
        if grid is None:
            continue
        if grid != of_fsdp2[key]:
            found = "tensor-parallel {} and data-parallel {}".format(*of_fsdp2[key])
            raise torch_dist.mixed_swiglu_rows_error(key, grid, found)
        mixed.add(key)
    if not mixed:
        return sharded_state_dict

    def as_saved(value: "Any") -> "Any":
        if hasattr(getattr(value, "build_fn", None), "fsdp2_halves") and value.key in mixed:
            return replace(value, build_fn=value.build_fn.fsdp2_halves)
        return value

    return dict_list_map_outplace(as_saved, sharded_state_dict)


@fix.edit(UTILS, releases=(("0.12.0", "0.18.2"),))
def note_size(source: Source) -> None:
    """Upstream marks sharded tensors of FSDP2 parameters since 0.19, and gets the size from their group."""
    if b"is_torch_fsdp2_param" in source.data:
        raise NoMatch(
            "expected code that does not know parameters of FSDP2, found is_torch_fsdp2_param"
        )
    make = source.function("make_tp_sharded_tensor_for_checkpoint")
    kept = f"sharded_tensor.{SIZE} = {SIZE}"
    source.skip_if(f"{SIZE} = None", f"{SIZE} = dp_size", kept, within=make)
    of_dtensor = source.branch("HAVE_DTENSOR and isinstance(tensor, DTensor)", within=make)
    source.insert_before(of_dtensor, f"{SIZE} = None")
    source.insert_before(of_dtensor.body[0], f"{SIZE} = dp_size")
    made = source.one("return ShardedTensor.from_rank_offsets(...)", within=make)
    text = source.text(made.value).replace("\n    ", "\n")
    source.replace(
        made,
        f"""sharded_tensor = {text}
if {SIZE} is not None:
    {kept}
return sharded_tensor""",
    )


@fix.edit("megatron.core.transformer.mlp")
def place_rows(source: Source) -> None:
    """Upstream does so since 0.19, but does not handle mixed rows in older checkpoints."""
    make = source.function("apply_swiglu_sharded_factory")
    upstreams = source.has("dp_sh_ten_build_fn if is_dp_sharded else sh_ten_build_fn", within=make)
    build = "sh_ten_factory_build_function" if upstreams else "build_fn"
    made = source.one("return ShardedTensorFactory(...)", within=make)
    parts: list[Part] = [f"{build}.{GRID} = ...", f"{build}.{HALVES} = sh_ten_build_fn"]
    if not upstreams:
        parts += [(build, made), _fsdp2_swiglu_build_fn]
    source.skip_if(*parts, within=make)
    if upstreams:
        text = f"""if is_torch_fsdp2_param:
    {build}.{GRID} = (axis_frag // dp_size, dp_size)
    {build}.{HALVES} = sh_ten_build_fn"""
    else:
        text = f"""build_fn = sh_ten_build_fn
dp_size = getattr(original_sh_ten, "{SIZE}", None)
if dp_size is not None:
    build_fn = _fsdp2_swiglu_build_fn(original_sh_ten, sharded_offsets, dp_size)
    build_fn.{GRID} = (axis_frag // dp_size, dp_size)
    build_fn.{HALVES} = sh_ten_build_fn"""
        source.replace(source.one("sh_ten_build_fn", within=made), build)
        source.insert_function_before(make, _fsdp2_swiglu_build_fn)
    source.insert_before(made, text)


@fix.edit("megatron.core.dist_checkpointing.serialization")
def ask_for_rows_as_saved(source: Source) -> None:
    load = source.function("load")
    asked = f"sharded_state_dict = {with_swiglu_rows_as_saved.__name__}(...)"
    source.skip_if(asked, with_swiglu_rows_as_saved, within=load)
    before = source.one(
        "sharded_state_dict, nonpersistent_state_dict, sh_ten_factories = load_preprocess(...)",
        within=load,
    )
    source.insert_before(before, asked.replace("...", "sharded_state_dict, checkpoint_dir"))
    source.insert_function_before(load, with_swiglu_rows_as_saved)


@fix.edit("megatron.core.dist_checkpointing.strategies.torch")
def refuse_mixed_rows(source: Source) -> None:
    """Check the rows where upstream checks the shapes against the checkpoint's metadata."""
    plan = source.function("MCoreLoadPlanner.create_local_plan")
    functions = (mixed_swiglu_grid, mixed_swiglu_rows_error, check_swiglu_rows)
    source.skip_if(f"{check_swiglu_rows.__name__}(...)", *functions, within=plan)
    metadata_and_tensors = "(self.metadata, self.shapes_validation_sharded_tensors)"
    shapes = source.one(f"self._validate_global_shapes{metadata_and_tensors}", within=plan)
    source.insert_after(shapes, f"{check_swiglu_rows.__name__}{metadata_and_tensors}")
    for function in functions:
        source.insert_function_before("MCoreLoadPlanner", function)
