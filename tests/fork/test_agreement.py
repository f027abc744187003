"""If one rank lacks a fix, or has other fixes, the others raise an error, and no rank waits for another."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trainers.ranks import free_port
from upstream import all_releases, newest, run, run_lines, tree

RANKS = 3
VERSION, FIX = "0.14.0", "zarr_range_write"
WITHOUT = {"no package": {"CKPT_PATCHES": "off"}, "skipped": {"CKPT_PATCHES_SKIP": FIX}}


def on_ranks(out: Path, differs: dict[int, dict[str, str]]) -> list[dict[str, Any]]:
    """The result of each rank; empty for a rank that did not get so far."""
    port = str(free_port())

    def one(rank: int) -> dict[str, Any]:
        env = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_PORT": port}
        env |= differs.get(rank, {})
        on = tree("megatron-core", VERSION)
        found = run_lines("ranks_that_differ", out, tree=on, delivery="hook", env=env, check=False)
        return found[0] if found else {}

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


@pytest.mark.slow
def test_ranks_that_are_alike_ask_each_other_once(tmp_path: Path) -> None:
    assert [found["error"] for found in on_ranks(tmp_path, {})] == [""] * RANKS


FAKE = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from ckpt_patches.engine.agreement import _announce_fix, _check_all_ranks_have_fix
import ckpt_patches.engine.agreement as agreement, torch
agreement.torch = torch
_announce_fix("fix.1")
for store in (FakeStore(), dist.HashStore()):
    dist.init_process_group("fake", store=store, rank=0, world_size=8)
    _announce_fix("fix.1")
    _check_all_ranks_have_fix("fix.1", 1)
    agreement._check_all_ranks_have_fix.checked.clear()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_dry_run_without_other_ranks_is_not_stopped(tmp_path: Path) -> None:
    """A job with fake ranks, or without a process group, runs without an error."""
    (tmp_path / "fake.py").write_text(FAKE)
    run(tmp_path / "fake.py", tree=tree("megatron-core", newest("megatron-core")), imports=("torch",))


SOME = [(0, "skipped"), (1, "no package")]  # each takes half a minute
DIFFER = list(itertools.product((0, 1), WITHOUT)) if all_releases() else SOME


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "without"), DIFFER)
def test_one_that_differs_is_named_within_a_minute(rank: int, without: str, tmp_path: Path) -> None:
    """All ranks that have the fix name the one without it, which ends with them."""
    found = on_ranks(tmp_path, {rank: WITHOUT[without]})
    del found[rank]
    for other in found:
        assert other["error"].startswith(f"{FIX}: 2 of 3 ranks have it, rank {rank} has not. "), found
        assert other["seconds"] < 60
