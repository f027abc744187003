"""zarr_create_synchronizer: a zarr save of the real megatron-core with a forced interleaving of writes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from trainers.lazy import zarr_saving
from upstream import ZARR_WRITES, affected, called, with_fix, without_fix

FIX = "zarr_create_synchronizer"
AFFECTED = affected(FIX)
KEYS = ["exp_avg", "exp_avg_sq", "fp32_param"]
ARRAYS = [f"optimizer.state.{key}.w" for key in KEYS]


def save_in_a_race(
    version: str, delivery: str, tmp_path: Path, tp: int = 1, dtype: str = "float32"
) -> tuple[list[list[object]], object]:
    """The lost slices by key and rank, and the result of listing the checkpoint; with only this fix."""
    on: dict[str, Any] = {"version": version, "delivery": delivery, "folder": tmp_path, "fixes": [FIX]}
    lost, listed = called(__file__, "race", tp, dtype, imports=ZARR_WRITES, **on)
    return sorted(lost), listed


@without_fix(AFFECTED)
def test_upstream_loses_what_others_write_while_the_creator_writes(version: str, delivery: str, tmp_path: Path) -> None:
    lost, listed = save_in_a_race(version, delivery, tmp_path)
    assert lost == [[key, rank] for key in KEYS for rank in (1, 2, 3)]
    assert "JSONDecodeError" in str(listed)  # a lock named .zarray is read as metadata


@with_fix(AFFECTED)
def test_every_slice_is_written(version: str, delivery: str, tmp_path: Path) -> None:
    assert save_in_a_race(version, delivery, tmp_path) == ([], ARRAYS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_slice_is_written_with_tensor_parallel_chunks(dtype: str, tmp_path: Path) -> None:
    assert save_in_a_race("0.14.0", "hook", tmp_path, 2, dtype) == ([], ARRAYS)


# What the ranks run

RANKS, ROWS, COLUMNS = 4, 24, 50  # of a tensor-parallel rank's shard


def race(folder: Path, tp: int, dtype: str) -> Any:
    return zarr_saving.results(save, RANKS, folder, tp, dtype)[0]


def save(rank: int, folder: Path, tp: int, dtype_name: str) -> Any:
    """Save while the creating rank is inside its read-modify-write; see `force_race`.

    Rank 0 creates the arrays, and returns the lost slices, by key and rank, and the result of listing the checkpoint.
    """
    from megatron.core.dist_checkpointing.strategies import zarr as strategy

    out, dp, dtype = folder / "checkpoint", RANKS // tp, getattr(torch, dtype_name)
    keys = {f"optimizer.state.{key}.w": key for key in KEYS}
    state = {
        name: zarr_saving.flattened_shard(key, rank, dp, tp, (ROWS, COLUMNS), dtype=dtype) for key, name in keys.items()
    }
    out.mkdir(exist_ok=True)
    zarr_saving.force_race(rank, dp, folder)
    torch.distributed.barrier()
    strategy.ZarrSaveShardedStrategy("zarr", 1).save(state, out)
    torch.distributed.barrier()
    if rank:
        return None
    try:
        listed: object = sorted(strategy.ZarrLoadShardedStrategy().load_tensors_metadata(out))
    except ValueError as error:  # a lock file read as an array's metadata
        listed = f"{type(error).__name__}: {error}"
    return [(keys[key], owner) for key, owner in zarr_saving.lost_slices(out, keys, RANKS, dp, dtype)], listed
