"""zarr_create_synchronizer: a zarr save of the real megatron-core with a forced interleaving of writes."""

from pathlib import Path

import pytest

from upstream import affected, run_json, tree, with_fix, without_fix

FIX = "zarr_create_synchronizer"
AFFECTED = affected(FIX)
KEYS = ["exp_avg", "exp_avg_sq", "fp32_param"]
ARRAYS = [f"optimizer.state.{key}.w" for key in KEYS]


def save_in_a_race(version: str, delivery: str, tmp_path: Path, *options: str) -> tuple[list[list[object]], object]:
    """The lost slices by key and rank, and the result of listing the checkpoint; with only this fix."""
    out = tmp_path / "checkpoint"
    out.mkdir()
    found = run_json("zarr_race", out, *options, tree=tree("megatron-core", version), delivery=delivery, fixes=[FIX])
    return sorted(found["lost"]), found["listed"]


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
    assert save_in_a_race("0.14.0", "hook", tmp_path, "--tp", "2", "--dtype", dtype) == ([], ARRAYS)
