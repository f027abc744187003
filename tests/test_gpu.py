"""On a real GPU, without the stand-in: the hybrid optimizer and a save, as the other tests do them on the CPU."""

from pathlib import Path
from typing import Any

import pytest

from upstream import newest, run_lines, tree

pytestmark = pytest.mark.gpu
NEWEST = newest("megatron-core")
ON_A_GPU = {"MEGATRON_TRAINING_ON_A_GPU": "1"}


def lines(program: str, *options: str | Path, delivery: str) -> list[dict[str, Any]]:
    on = tree("megatron-core", NEWEST)
    return run_lines(program, *options, "--ranks", "1", tree=on, delivery=delivery, env=ON_A_GPU)


def test_the_hybrid_optimizer_keeps_the_loaded_weights() -> None:
    assert any(result["lost"] for result in lines("hybrid_reload", delivery="none"))
    assert not any(result["lost"] or result["stale"] for result in lines("hybrid_reload", delivery="hook"))


def test_an_empty_state_is_saved_and_resumed(tmp_path: Path) -> None:
    options = ("--inner", "torch", "--formats", "torch,dp_zero_gather_scatter,dp_reshardable,fully_reshardable")
    (without, *_) = lines("empty_state", tmp_path / "none", *options, delivery="none")
    assert without["error"] == "save: KeyError: 'exp_avg'"
    for result in lines("empty_state", tmp_path / "hook", *options, delivery="hook"):
        assert (result["error"], result["resume"]) == ("", "bit-equal")


def test_the_state_gathered_in_its_place_is_upstreams() -> None:
    """One rank, so NCCL sends nothing; the shards go through the GPU."""
    file = tree("megatron-core", NEWEST) / "megatron/core/optimizer/distrib_optimizer.py"
    (found,) = lines("lean_gather", file, "--parts", "equal", delivery="hook")
    (rank,) = found["ranks"]
    assert set(rank["save"].values()) == {""}
    assert rank["load"] == ""
