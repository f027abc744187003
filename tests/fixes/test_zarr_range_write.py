"""zarr_range_write: zarr saves are complete where locks have no effect."""

import fcntl
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from upstream import ZARR_WRITES, all_releases, run, run_json, shown, shown_on, tree, with_fix, without_fix

RELEASES = shown_on("zarr_range_write")


@without_fix(RELEASES)
def test_slices_are_lost(version: str, delivery: str) -> None:
    assert "slices lost, and no error" in shown(__file__, version, delivery, imports=ZARR_WRITES)


@with_fix(RELEASES)
def test_every_slice_is_written(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery, imports=ZARR_WRITES) == ""


# Further cases

FIX = "zarr_range_write"
SYNCHRONIZED = ("zarr_create_synchronizer",)
ZARR = "megatron.core.dist_checkpointing.strategies.zarr"
KEY = "optimizer.state.exp_avg.w"
RANKS = 16
DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool")

Case = dict[str, Any]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A shape, its split per axis, prepended axes, a dtype, and uneven ranges, for at most 16 ranks."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    prepended = draw(st.sampled_from([[], [], [2], [1, 2]]))
    grid = [1] * len(shape)
    grid[draw(st.integers(0, len(shape) - 1))] = draw(st.sampled_from([1, 1, 2, 4]))
    shards, numel = math.prod([*prepended, *grid]), math.prod(shape)
    dp = draw(st.integers(1, max(1, min(RANKS // shards, numel))))
    cuts = draw(st.lists(st.integers(1, max(1, numel - 1)), min_size=dp - 1, max_size=dp - 1, unique=True))
    dtype = draw(st.sampled_from(DTYPES))
    return {"shape": shape, "grid": grid, "prepended": prepended, "dtype": dtype, "cuts": sorted(cuts)}


def files(folder: Path) -> dict[str, bytes]:
    """All files of a checkpoint except locks."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    found = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    return {name: data for name, data in found.items() if ".sync/" not in name}


def drawn(count: int) -> list[Case]:
    """Different cases, run by one start of the processes; the first is the simplest."""
    found: list[Case] = []

    @settings(max_examples=count, phases=[Phase.generate])
    @given(case=cases())
    def keep(case: Case) -> None:
        found.append(case)

    keep()
    return found


@pytest.mark.slow
def test_the_files_are_those_of_a_synchronized_save(tmp_path: Path) -> None:
    folder, batch = tmp_path, drawn(60 if all_releases() else 30)
    assert {case["dtype"] for case in batch} == set(DTYPES)
    assert {len(case["prepended"]) for case in batch} == {0, 1, 2}
    assert any(len(case["cuts"]) > 1 for case in batch)
    (folder / "cases.json").write_text(json.dumps(batch))
    found = {}
    for fixes in ((FIX,), SYNCHRONIZED):
        out = folder / fixes[0]
        arguments = (out, folder / "cases.json", "--ranks", str(RANKS))
        result = run_json("zarr_ranges", *arguments, tree=tree("megatron-core", "0.14.0"), delivery="hook", fixes=fixes)
        assert result["wrong"] == []
        assert bool(result["locks"]) == (fixes == SYNCHRONIZED)
        found[fixes] = files(out)
    ours, synchronized = found[FIX,], found[SYNCHRONIZED]
    assert sorted(name for name in ours.keys() | synchronized.keys() if ours.get(name) != synchronized.get(name)) == []
    assert len(found[FIX,]) >= 2 * len(batch)


FAILURES = {
    "missing": "{chunk}: expected to write 16384 bytes at 0, wrote 0: No such file or directory",
    "truncated": "{chunk}: expected a chunk file of 32768 bytes, found 1000",
    "full": "{chunk}: expected to write 16384 bytes at 0, wrote 100: No space left on device",
    "denied": "{chunk}: expected to write 16384 bytes at 0, wrote 0: Permission denied",
}


def fail(failure: str, out: Path, check: bool = True) -> str:
    release = tree("megatron-core", "0.14.0")
    return run("zarr_failures", out, failure, tree=release, delivery="hook", check=check).stdout


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_said_on_all_ranks(failure: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "chunk").write_bytes(b"data")
    results = json.loads(fail(failure, tmp_path / "out").splitlines()[-1])
    said = FAILURES[failure].format(chunk=tmp_path / "out" / KEY / "1.0")
    assert results[2] == f"CheckpointingException: {said}"
    others = [results[rank] for rank in (0, 1, 3)]
    assert others == [f"CheckpointingException: the save failed on rank 2: {said}"] * 3
    assert (tmp_path / "earlier" / "chunk").read_bytes() == b"data"


def test_an_array_that_is_there_already_fails_all_ranks_before_anything_is_written(tmp_path: Path) -> None:
    results = json.loads(fail("exists", tmp_path).splitlines()[-1])
    assert all(result.endswith(f"Array {tmp_path / KEY} already exists") for result in results)
    assert [path.name for path in (tmp_path / KEY).iterdir()] == [".zarray"]


def test_locks_that_cannot_be_removed_fail_no_save(tmp_path: Path) -> None:
    assert json.loads(fail("locks", tmp_path).splitlines()[-1]) == ["", "", "", ""]
    assert all(any((tmp_path / KEY / name).read_bytes()) for name in ("0.0", "1.0"))


def test_a_rank_that_dies_leaves_a_hole_and_no_short_file(tmp_path: Path) -> None:
    assert "wrote" not in fail("dies", tmp_path, check=False)
    for name in ("0.0", "1.0"):
        assert (tmp_path / KEY / name).stat().st_size == 32768
    with open(tmp_path / KEY / "1.0", "rb") as chunk:  # the first half belongs to the dead rank
        assert os.lseek(chunk.fileno(), 0, os.SEEK_HOLE) == 0
        assert not any(chunk.read(16384))


def test_what_cannot_be_written_as_bytes_takes_the_locks_and_leaves_none(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FALLBACK)
    done = run(program, tmp_path / "out", tree=tree("megatron-core", "0.14.0"), delivery="hook", imports=ZARR_WRITES)
    assert json.loads(done.stdout.splitlines()[-1]) == {"equal": True, "left": ["even", "uneven"]}
    assert (
        "uneven: written under locks, which is slow: its shape (10,) is no multiple of its chunks (3,)" in done.stderr
    )
    assert "even: written by byte ranges: uncompressed chunks in a local directory" in done.stderr


# Ten elements on two ranks, in three declared fragments: the chunks of three match no rank's shard.
FALLBACK = """
import json, logging, sys
from pathlib import Path
import torch
import torch.distributed as dist
from trainers import zarr_saving

def tensor(key, rank, numel, fragments):
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    size = numel // 2
    data = torch.arange(size * rank, size * (rank + 1)).float()
    return ShardedTensor(key, data, torch.float32, (size,), (numel,), (size * rank,), (fragments,), replica_id=0,
                         allow_shape_mismatch=fragments == 3, flattened_range=slice(0, size))

def worker(rank, out):
    from megatron.core.dist_checkpointing.strategies import zarr as strategy
    import zarr
    logging.basicConfig(level=logging.INFO, force=True)
    if rank == 0:
        out.mkdir()
    dist.barrier()
    state = {"even": tensor("even", rank, 12, 2), "uneven": tensor("uneven", rank, 10, 3)}
    strategy.ZarrSaveShardedStrategy("zarr", 1).save(state, out)
    dist.barrier()
    if rank == 0:
        saved = {key: zarr.open(str(out / key), "r")[:].tolist() for key in state}
        equal = saved == {"even": list(range(12)), "uneven": list(range(10))}
        print(json.dumps({"equal": equal, "left": sorted(path.name for path in out.iterdir())}))

zarr_saving.spawn(worker, 2, Path(sys.argv[1]))
"""

# What the ranks run

WRITERS, SAVES = 8, 10
ARRAY = "optimizer.state.exp_avg.weight"


def bug(folder: Path) -> str:
    from trainers import zarr_saving

    lost = zarr_saving.results(save, WRITERS, folder)[0]
    return f"{lost} of {WRITERS * SAVES} slices lost, and no error" if lost else ""


def save(rank: int, folder: Path) -> int:
    from megatron.core.dist_checkpointing.strategies.zarr import ZarrSaveShardedStrategy

    from trainers import zarr_saving

    fcntl.lockf = lambda *args, **kwargs: None
    random.seed(rank)
    zarr_saving.write_in_pieces()
    zarr_saving.pause_behind_reads()
    lost = 0
    for number in range(SAVES):
        out = folder / str(number)
        out.mkdir(exist_ok=True)
        dist.barrier()
        shard = zarr_saving.flattened_shard(ARRAY, rank, WRITERS, 1, (16, 32))
        ZarrSaveShardedStrategy("zarr", 1).save({"weight": shard}, out)
        lost += len(zarr_saving.lost_slices(out, [ARRAY], WRITERS, WRITERS))
        dist.barrier()
    return lost
