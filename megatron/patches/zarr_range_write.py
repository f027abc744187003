"""Write each rank's flattened range directly to its bytes in the chunk file, without locks or reads.

https://github.com/NVIDIA/Megatron-LM/issues/834
"""

from collections.abc import Callable

from ckpt_patches.engine.agreement import insert_agreement
from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NotNeeded, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    import math
    import os
    import shutil
    from dataclasses import replace
    from pathlib import Path

    import torch
    import zarr
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.zarr import (
        _create_zarr_array,
        _open_zarr_array_verbose,
        torch_to_numpy_dtype_dict,
    )

    logger = logging.getLogger(__name__)

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/issues/834",
        "https://github.com/NVIDIA/Megatron-LM/issues/1053",
    ),
    symptom="slow saves; slices are lost where file locks do not reach other nodes",
    releases=(("0.12.0", "0.15.3"),),
    stacks="zarr format, distributed optimizer",
    silent=True,
)


def _why_not_byte_ranges(arr: "zarr.Array", sharded_tensor: "ShardedTensor") -> str:
    """Return why a flattened range is not a byte range of one chunk file; empty if it is one.

    All ranks must decide alike: a write without a lock must not coincide with another rank's
    read-modify-write of the same chunk.
    """
    if type(arr.store) is not zarr.DirectoryStore:
        return f"its store is a {type(arr.store).__name__}, not a local directory"
    if arr.compressor is not None or arr.filters:
        return "its chunks are compressed or filtered"
    if arr.order != "C":
        return f"its chunks are in {arr.order} order"
    if arr.dtype != torch_to_numpy_dtype_dict[sharded_tensor.dtype] or not arr.dtype.isnative:
        return f"it stores {sharded_tensor.dtype} as {arr.dtype}"
    if any(size % chunk for size, chunk in zip(arr.shape, arr.chunks, strict=True)):
        return f"its shape {arr.shape} is no multiple of its chunks {arr.chunks}"
    return ""


def _chunk_path(arr: "zarr.Array", coordinates: "tuple[int, ...]") -> str:
    """Return the file of the chunk at these coordinates of the chunk grid."""
    return os.path.join(str(arr.store.path), arr._chunk_key(coordinates or (0,)))


def _create_flattened_array(
    sharded_tensor: "ShardedTensor", checkpoint_dir: "Path"
) -> "zarr.Array":
    """Create the array of a flattened tensor, and log how ranks write to it."""
    arr = _create_zarr_array(
        replace(sharded_tensor, data=None, flattened_range=None), checkpoint_dir
    )
    reason = _why_not_byte_ranges(arr, sharded_tensor)
    if reason:
        logger.warning(f"{sharded_tensor.key}: written under locks, which is slow: {reason}")
        return _open_flattened_array(sharded_tensor, checkpoint_dir)
    logger.info(
        f"{sharded_tensor.key}: written by byte ranges: uncompressed chunks in a local directory"
    )
    return arr


def _open_flattened_array(sharded_tensor: "ShardedTensor", checkpoint_dir: "Path") -> "zarr.Array":
    """Open the array of a flattened tensor, with locks only if byte ranges are impossible."""
    path = checkpoint_dir / sharded_tensor.key
    arr = _open_zarr_array_verbose(path, "r+")
    if not _why_not_byte_ranges(arr, sharded_tensor):
        return arr
    locks = zarr.ProcessSynchronizer(str(checkpoint_dir / f"{sharded_tensor.key}.sync"))
    return _open_zarr_array_verbose(path, "r+", synchronizer=locks)


def _write_byte_range(sharded_tensor: "ShardedTensor", arr: "zarr.Array") -> None:
    """Write a flattened range of a local shard (one chunk) to its bytes in the chunk file.

    The first rank to write creates the file, so no rank has to create the files of all others.
    """
    if arr.chunks != (1,) * sharded_tensor.prepend_axis_num + tuple(sharded_tensor.local_shape):
        raise CheckpointingException(
            f"{sharded_tensor.key}: expected a local shard of one chunk, {arr.chunks}, "
            f"found {sharded_tensor.local_shape}"
        )
    data = sharded_tensor.data.detach().cpu().contiguous()
    torch.cuda.synchronize()
    content = memoryview(data.view(torch.uint8).numpy())
    start = sharded_tensor.flattened_range.start * data.element_size()
    path = _chunk_path(
        arr, tuple(o // c for o, c in zip(sharded_tensor.global_offset, arr.chunks, strict=True))
    )
    nbytes = math.prod(arr.chunks) * arr.dtype.itemsize
    written = 0
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            size = os.fstat(file).st_size
            # Set the full size before any write, so that a failed rank leaves a detectable hole.
            # Several ranks of a chunk may do this; it does not change written data.
            if size == 0:
                os.ftruncate(file, nbytes)
            elif size != nbytes:
                raise CheckpointingException(
                    f"{path}: expected a chunk file of {nbytes} bytes, found {size}"
                )
            while written < len(content):
                count = os.pwrite(file, content[written:], start + written)
                if count == 0:
                    raise OSError(0, "nothing more could be written")
                written += count
        finally:
            os.close(file)  # a network file system may report a full disk only here
    except OSError as error:
        raise CheckpointingException(
            f"{path}: expected to write {len(content)} bytes at {start}, wrote {written}: "
            f"{error.strerror}"
        ) from error


def _attempt(
    failures: "list[Exception]", function: "Callable[..., object]", *args: "object"
) -> "object":
    """Call a function, and keep an exception for `_raise_failures`, so that no rank hangs."""
    try:
        return function(*args)
    except Exception as error:
        failures.append(error)
        return None


def _raise_failures(failures: "list[Exception]") -> None:
    """Wait for all ranks, and raise on every rank if one has failed."""
    on_gpu = torch.cuda.is_available() and torch.distributed.get_backend() != "gloo"
    failed = torch.tensor(len(failures), device="cuda" if on_gpu else "cpu")
    torch.distributed.all_reduce(failed)
    if not failed:
        return
    messages: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(messages, str(failures[0]) if failures else None)
    if failures:
        raise failures[0]
    rank, message = next(
        (rank, message) for rank, message in enumerate(messages) if message is not None
    )
    raise CheckpointingException(f"the save failed on rank {rank}: {message}")


def _remove_lock_directories(checkpoint_dir: "Path") -> None:
    """Remove the lock directories, which are no longer used but would appear in listings.

    A failure is only logged, because the checkpoint is complete.
    """
    if torch.distributed.get_rank() != 0:
        return
    try:
        for locks in Path(checkpoint_dir).glob("*.sync"):
            of_array = locks.with_suffix("").joinpath(".zarray").exists()
            if of_array and not any(file.stat().st_size for file in locks.iterdir()):
                shutil.rmtree(locks)
    except OSError as error:
        logger.warning(
            f"{checkpoint_dir}: left directories with locks, which nobody needs: {error}"
        )


RANGE_WRITERS = (
    _why_not_byte_ranges,
    _chunk_path,
    _create_flattened_array,
    _open_flattened_array,
    _write_byte_range,
)
FAILURE_HELPERS = (_attempt, _raise_failures, _remove_lock_directories)


CREATED = "arr = _create_zarr_array(ten, checkpoint_dir) if _should_create_array(ten) else None"
CREATED_OR_FAILED = """arr = (
    _attempt(failures, _create_zarr_array, ten, checkpoint_dir)
    if _should_create_array(ten)
    else None
)"""


@fix.edit("megatron.core.dist_checkpointing.strategies.zarr")
def write_byte_ranges(source: Source) -> None:
    """One write replaces the coordinates of every element and the read-modify-write of the complete chunk."""
    create_or_open = source.function("_create_or_open_zarr_arrays")
    save = source.function("_save_to_existing_array")
    create = source.function("_create_zarr_array")
    source.skip_if(
        ("_create_flattened_array(...)", create),
        ("_write_byte_range(...)", save),
        "_attempt(failures, _open_flattened_array, ten, checkpoint_dir)",
        "_attempt(failures, _open_zarr_array_verbose, checkpoint_dir / ten.key, 'r+')",
        *RANGE_WRITERS,
        not source.has("open_kwargs", create_or_open),
        within=create_or_open,
    )
    source.insert_at_start(
        create,
        """if sharded_tensor.flattened_range is not None:
    return _create_flattened_array(sharded_tensor, checkpoint_dir)""",
    )
    # The inserted function opens every flattened range, with locks if needed.
    source.replace(
        source.one("open_kwargs = {}", within=create_or_open),
        """if ten.flattened_range is not None:
    arrays[arr_idx] = _attempt(failures, _open_flattened_array, ten, checkpoint_dir)
    continue""",
    )
    source.remove(source.branch("ten.flattened_range is not None", within=create_or_open))
    source.replace(
        source.one(
            "_open_zarr_array_verbose(checkpoint_dir / ten.key, 'r+', **open_kwargs)",
            within=create_or_open,
        ),
        """_attempt(
    failures, _open_zarr_array_verbose, checkpoint_dir / ten.key, "r+"
)""",
    )
    source.insert_after(
        source.one("assert arr is not None", within=save),
        """if sharded_tensor.flattened_range is not None and arr.synchronizer is None:
    _write_byte_range(sharded_tensor, arr)
    return""",
    )
    for function in RANGE_WRITERS:
        source.insert_function_before(create_or_open, function)


@fix.edit("megatron.core.dist_checkpointing.strategies.zarr")
def fail_on_all_ranks(source: Source) -> None:
    """In upstream, a failed rank leaves the others waiting in a barrier."""
    create_or_open = source.function("_create_or_open_zarr_arrays")
    save = source.function("ZarrSaveShardedStrategy.save")
    calls = source.all("_create_or_open_zarr_arrays(...)", within=save)
    create_attempt = "_attempt(failures, _create_zarr_array, ten, checkpoint_dir)"
    save_attempt = "_attempt(failures, _save_to_existing_array, ten, arr)"
    source.skip_if(
        (create_attempt, create_or_open),
        save_attempt,
        ("_raise_failures(failures)", create_or_open),
        "_raise_failures(failures)",
        "failures: List[Exception] = []",
        "_remove_lock_directories(checkpoint_dir)",
        *FAILURE_HELPERS,
        "failures" in [argument.arg for argument in create_or_open.args.args],
        any(source.text(call.args[-1]) == "failures" for call in calls),
        within=save,
    )
    source.one("_create_zarr_array(ten, checkpoint_dir)", within=create_or_open)
    source.replace(source.one(CREATED, within=create_or_open), CREATED_OR_FAILED)
    save_array = source.one("_save_to_existing_array(ten, arr)", within=save)
    source.replace(save_array, save_attempt)
    for function in (create_or_open, save):
        source.replace(
            source.one("torch.distributed.barrier()", within=function), "_raise_failures(failures)"
        )
    # If an array could not be opened, its save fails, too: both use the same list.
    source.add_parameter(create_or_open, "failures: List[Exception]")
    create_arrays = source.one("arrays = _create_or_open_zarr_arrays(...)", within=save)
    source.insert_before(create_arrays, "failures: List[Exception] = []")
    source.insert_at(create_arrays.value.args[-1], ", failures", end=True)
    source.insert_after(save.body[-1], "_remove_lock_directories(checkpoint_dir)")
    for helper in FAILURE_HELPERS:
        source.insert_function_before(create_or_open, helper)


@fix.edit("megatron.core.dist_checkpointing.strategies.zarr", independent=True)
def import_modules(source: Source) -> None:
    """Import the modules that the inserted functions need and upstream does not import."""
    if all(source.imports(name) for name in ("math", "shutil", "replace")):
        raise NotNeeded
    if not source.imports("math"):
        source.insert_after(source.one("import logging"), "import math")
    if not source.imports("shutil"):
        source.insert_after(source.one("import os"), "import shutil")
    if not source.imports("replace"):
        source.insert_before(
            source.one("from functools import partial"), "from dataclasses import replace"
        )


@fix.edit("megatron.core.dist_checkpointing.strategies.zarr", independent=True, ours_alone=True)
def agree_first(source: Source) -> None:
    """`_raise_failures` and upstream's barrier do not match."""
    save = source.function("ZarrSaveShardedStrategy.save")
    # A save creates the strategy before ranks first wait for each other.
    made = source.function("ZarrSaveShardedStrategy.__init__")
    insert_agreement(
        source,
        f"{fix.name}.2",
        by_upstream=source.has("_raise_failures(failures)", save),
        announce=made.body[-1],
        check=(save,),
        patience=30,
        before=source.class_named("ZarrSaveShardedStrategy"),
    )
