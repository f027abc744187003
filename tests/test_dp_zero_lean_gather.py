"""dp_zero_lean_gather: the real megatron-core gathers the same state, directly into its final place.

The program compares the package's methods with those of upstream's file, in one process and on one state.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import edits
from ckpt_patches.engine.registry import FIXES
from upstream import (
    affected,
    in_place,
    newest,
    newest_affected,
    numbers,
    releases,
    run_lines,
    tree,
    with_fix,
    without_fix,
)

FIX = "dp_zero_lean_gather"
DISTRIB_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
ALL = affected(FIX)
NEWEST = newest_affected(FIX)[1]
# The other fixes that edit the same module.
NEIGHBOURS = [name for name, modules in FIXES.items() if DISTRIB_OPTIMIZER in modules and name != FIX]
SLACK = 0.7  # MiB; a shard of the memory tests has 0.5, a bucket 2
LOOKED_AT = 0.5  # MiB; `param_remainders` checks a piece of the loaded state, with functions first called there
PIECES = 256  # MiB


def lean_gather(
    version: str, delivery: str, *options: str, env: dict[str, str] | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Each rank's results, by part."""
    on = tree("megatron-core", version)
    file = on / "megatron/core/optimizer/distrib_optimizer.py"
    lines = run_lines("lean_gather", file, *options, tree=on, delivery=delivery, env=env)
    return {line["part"]: line["ranks"] for line in lines}


def with_nccl(version: str) -> bool:
    return numbers(version) >= (0, 15)


@without_fix(ALL)
def test_upstream_needs_buckets_beside_the_state(version: str, delivery: str) -> None:
    rank_0, *_ = lean_gather(version, delivery, "--parts", "memory")["memory"]
    names = ["gloo", *(["nccl", "gloo, all ranks", "nccl, all ranks"] if with_nccl(version) else [])]
    assert all(rank_0[f"{name}"] > 2 * rank_0["bucket"] for name in names), rank_0
    assert rank_0["load"] > 1.5 * rank_0["bucket"]


@with_fix(ALL)
def test_the_same_state_in_its_place(version: str, delivery: str) -> None:
    found = lean_gather(version, delivery)
    check_equal(found["equal"])
    check_collectives(found["equal"])
    check_memory(found["memory"])


def check_equal(ranks: list[dict[str, Any]]) -> None:
    """Check that every rank saves and loads the same bits as with upstream's methods."""
    padded, unpadded = ranks[0]["buckets"][-1]
    assert len(ranks[0]["buckets"]) > 2
    assert unpadded < padded / len(ranks)  # a bucket with ranks that have only padding
    assert any(rank["split"] for rank in ranks)  # parameters split between two ranks
    for rank in ranks:
        assert set(rank["save"].values()) == {""}, rank["save"]
        assert rank["load"] == ""


def check_collectives(ranks: list[dict[str, Any]]) -> None:
    """Check the calls: with Gloo to rank 0, a message per state and shard; else a collective per state and bucket."""
    states = 3 * len(ranks[0]["buckets"])
    sent = [3 * shards_of(rank, ranks) for rank in range(len(ranks))]
    for rank, found in enumerate(ranks):
        messages = ["irecv", sum(sent[1:])] if rank == 0 else ["isend", sent[rank]]
        expected = {"gloo": [messages] if messages[1] else [], "load": [["scatter", states]]}
        if "nccl" in found["calls"]:
            on_all_ranks = [["all_gather_into_tensor", states]]
            expected |= {"gloo, all ranks": on_all_ranks, "nccl, all ranks": on_all_ranks}
            expected |= {"nccl": [["gather", states]], "empty": []}
        assert found["calls"] == expected


def shards_of(rank: int, ranks: list[dict[str, Any]]) -> int:
    """The number of buckets in which a rank has more than padding."""
    return sum(rank * padded // len(ranks) < unpadded for padded, unpadded in ranks[0]["buckets"])


def check_memory(ranks: list[dict[str, Any]], pieces: int = PIECES) -> None:
    """Check the memory growth of each process beyond the state that it returns."""
    bucket, shard = ranks[0]["bucket"], ranks[0]["shard"]
    pieces = min(bucket, pieces)  # of all ranks, in one buffer; Gloo has another one
    assert ranks[0]["gloo"] < SLACK
    for rank in ranks:
        assert rank["gloo"] < 3 * shard + SLACK  # of all three states
        assert rank["load"] < max(bucket, 3 * shard) + SLACK + LOOKED_AT  # of all three states, which are set together
        for name in ("nccl", "gloo, all ranks", "nccl, all ranks"):  # the fake GPU uses this process's memory
            assert rank.get(name, 0) < 3 * shard + 2 * pieces + 2 * pieces / len(ranks) + SLACK, (name, rank)


@pytest.mark.slow
@pytest.mark.parametrize("version", releases("megatron-core", oldest=NEWEST))
def test_what_goes_through_a_buffer_does_so_in_pieces(version: str, tmp_path: Path) -> None:
    """A bucket of four pieces needs buffers for pieces only. Pieces are reduced here, to avoid a bucket of 1 GiB."""
    pieces = 8  # MiB
    copy = tmp_path / f"megatron-core-{version}"
    shutil.copytree(in_place(tree("megatron-core", version)), copy)
    file = copy / "megatron/core/optimizer/distrib_optimizer.py"
    text = file.read_text(encoding="utf-8")
    assert text.count("2**26") == 1
    file.write_text(text.replace("2**26", "2**21"), encoding="utf-8")
    options = ("--parts", "memory", "--ranks", "2", "--elements", str(4 * pieces * 2**18))
    upstream_file = tree("megatron-core", version) / file.relative_to(copy)
    (found,) = run_lines("lean_gather", upstream_file, *options, tree=copy)
    assert found["ranks"][0]["bucket"] == 4 * pieces
    check_memory(found["ranks"], pieces)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("--inner", "torch", "--ranks", "2"), ("--precision-aware", "--ranks", "3")], ids=" ".join
)
@pytest.mark.parametrize("version", releases("megatron-core", oldest=NEWEST))
def test_for_every_inner_optimizer(version: str, options: Sequence[str]) -> None:
    found = lean_gather(version, "hook", "--parts", "equal", *options)
    check_equal(found["equal"])
    check_collectives(found["equal"])


def test_without_its_neighbours_it_does_the_same() -> None:
    found = lean_gather("0.7.0", "hook", "--parts", "equal", env={"CKPT_PATCHES_SKIP": ",".join(NEIGHBOURS)})
    check_equal(found["equal"])
    check_collectives(found["equal"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("send_tensor = None", "del send_tensor"),
        ("tensors[key].detach().cpu()", "tensors[key].cpu()"),
        ("recv_tensors = {}\n", "recv_tensors = {}\n                seen = set()\n"),
    ],
)
def test_code_of_another_shape_is_left_alone(tmp_path: Path, old: str, new: str) -> None:
    copy = edits.copy_of(tree("megatron-core", newest("megatron-core")), FIX, tmp_path)
    edits.check_left_alone(copy, FIX, "megatron.core.optimizer.distrib_optimizer", old, new)
