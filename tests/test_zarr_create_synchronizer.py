"""zarr_create_synchronizer: a zarr save of the real megatron-core whose writes are interleaved by force."""

from collections.abc import Callable
from pathlib import Path

import pytest

import edits
from ckpt_patches.engine.plan import Outcome
from upstream import DELIVERIES, releases, run_json, tree

FIX = "zarr_create_synchronizer"
ZARR = "megatron.core.dist_checkpointing.strategies.zarr"
AFFECTED = releases("megatron-core", newest="0.14.0")
KEYS = ["exp_avg", "exp_avg_sq", "fp32_param"]
ARRAYS = [f"optimizer.state.{key}.w" for key in KEYS]


def save_in_a_race(version: str, delivery: str, tmp_path: Path, *options: str) -> tuple[list[list[object]], object]:
    """The lost slices, by key and rank, and what a listing of the checkpoint says; with this fix alone."""
    out = tmp_path / "checkpoint"
    out.mkdir()
    found = run_json("zarr_race", out, *options, tree=tree("megatron-core", version), delivery=delivery, fixes=[FIX])
    return sorted(found["lost"]), found["listed"]


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", ["none"])
@pytest.mark.parametrize("version", AFFECTED)
def test_upstream_loses_what_others_write_while_the_creator_writes(version: str, delivery: str, tmp_path: Path) -> None:
    lost, listed = save_in_a_race(version, delivery, tmp_path)
    assert lost == [[key, rank] for key in KEYS for rank in (1, 2, 3)]
    assert "JSONDecodeError" in str(listed)  # a lock named .zarray, read as metadata


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", AFFECTED)
def test_every_slice_is_written(version: str, delivery: str, tmp_path: Path) -> None:
    assert save_in_a_race(version, delivery, tmp_path) == ([], ARRAYS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_slice_is_written_with_tensor_parallel_chunks(dtype: str, tmp_path: Path) -> None:
    assert save_in_a_race("0.14.0", "hook", tmp_path, "--tp", "2", "--dtype", dtype) == ([], ARRAYS)


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", releases("megatron-core", oldest="0.15.0"))
def test_later_releases_do_not_need_it(
    version: str, delivery: str, record_property: Callable[[str, object], None]
) -> None:
    words = edits.check_not_needed(tree("megatron-core", version), FIX)
    assert words == ("fixed upstream" if version.startswith("0.15.") else "not present")
    record_property("compat", words)


def test_upstreams_own_fix_is_recognised() -> None:
    result, made = edits.plan(tree("megatron-core", "0.15.3"), FIX)
    assert (result.outcome, made.files) == (Outcome.ALREADY_THERE, {})


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("zarr.create(", "zarr.open_array(", "`zarr.create(...)` once in _create_zarr_array, found it 0 times"),
        ("def _create_zarr_array(", "def _make_zarr_array(", "one definition of _create_zarr_array, found 0"),
        ('not (subdir / ".zarray").exists()', "(subdir / '.zgroup').exists()", "found it 0 times"),
        ("        arr = zarr.create(", "        # zarr.create(\n        arr = zarr.array(", "found it 0 times"),
    ],
)
def test_unknown_code_is_left_alone_as_a_whole(tmp_path: Path, old: str, new: str, expected: str) -> None:
    copy = edits.copy_of(tree("megatron-core", "0.14.0"), FIX, tmp_path)
    reason = edits.check_left_alone(copy, FIX, ZARR, old, new)
    assert expected in reason


@pytest.mark.parametrize("version", ["0.7.0", "0.14.0"])
def test_the_lines_that_it_brings(version: str) -> None:
    _, made = edits.plan(tree("megatron-core", version), FIX)
    added = edits.added_lines(made)["zarr"]
    assert added[:-1] == [
        "synchronizer=(",
        'zarr.ProcessSynchronizer(str(checkpoint_dir / f"{sharded_tensor.key}.sync"))',
        "if sharded_tensor.flattened_range is not None",
        "else None",
        "),",
    ]
    assert added[-1].endswith(' or subdir.suffix == ".sync":')
