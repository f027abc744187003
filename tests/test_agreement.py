"""Ranks of which one has no fix, or another choice of fixes, are told so, and do not wait for each other."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from upstream import free_port, run, tree

RANKS = 3
ON = {"gather": ("0.19.2", "dp_zero_lean_gather"), "zarr": ("0.14.0", "zarr_range_write")}
WITHOUT = {"no package": {"CKPT_PATCHES": "off"}, "skipped": {"CKPT_PATCHES_SKIP": "NAME"}}


def on_ranks(what: str, out: Path, differs: dict[int, dict[str, str]]) -> list[dict[str, Any]]:
    """What came of it on each rank; nothing of one that did not come so far."""
    version, name = ON[what]
    port = str(free_port())

    def one(rank: int) -> dict[str, Any]:
        env = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_PORT": port}
        env |= {key: value.replace("NAME", name) for key, value in differs.get(rank, {}).items()}
        on = tree("megatron-core", version)
        done = run("ranks_that_differ", out, what, tree=on, delivery="hook", env=env, timeout=150, check=False)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return found[0] if found else {}

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


@pytest.mark.parametrize("what", [pytest.param("zarr", marks=pytest.mark.slow), "gather"])
def test_ranks_that_are_alike_ask_each_other_once(what: str, tmp_path: Path) -> None:
    assert [found["error"] for found in on_ranks(what, tmp_path, {})] == [""] * RANKS


@pytest.mark.slow
@pytest.mark.parametrize("without", WITHOUT)
@pytest.mark.parametrize("what", ON)
@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_differs_is_named_within_a_minute(what: str, rank: int, without: str, tmp_path: Path) -> None:
    """By all that have the fix; the one that has not ends with them."""
    found = on_ranks(what, tmp_path, {rank: WITHOUT[without]})
    del found[rank]
    for other in found:
        assert other["error"].startswith(f"{ON[what][1]}: 2 of 3 ranks have it, rank {rank} has not. "), found
        assert other["seconds"] < 60
