"""latest_after_all_ranks: `latest` names a checkpoint only after all ranks have written theirs."""

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trainers.lazy import dt
from trainers.ranks import RankError, free_port
from upstream import newest_affected, proof, run, run_lines, tree
from zero_checkpoints import PERMISSIVE

test_latest_names_a_checkpoint_that_a_killed_rank_has_not_written, test_latest_names_the_checkpoint_before_it = proof(
    __file__, "`latest` names a checkpoint without the files of rank 1"
)


# Further cases


FIX = "latest_after_all_ranks"

NEWEST = newest_affected(FIX)[1]


def on_ranks(what: str, out: Path, version: str, delivery: str, kind: str = "stage1") -> list[dict[str, Any]]:
    on: dict[str, Any] = {"tree": tree("deepspeed", version), "delivery": delivery}
    return run_lines("latest_too_early", what, out, kind, env=PERMISSIVE, **on)


def test_upstream_does_not_start_again_from_it(tmp_path: Path) -> None:
    """Each restart fails, until a user selects the checkpoint before it."""
    assert on_ranks("save", tmp_path, NEWEST, "none") == [{"latest": "second", "codes": [1, 3]}]
    assert len(list((tmp_path / "second").glob("*_optim_states.pt"))) == 1
    found = {one["rank"]: one for one in on_ranks("resume", tmp_path, NEWEST, "none")}
    assert found[1]["error"].startswith("FileNotFoundError")
    assert found[0] == {"rank": 0, "error": "", "tag": "second", "no moments": False}  # it waits for rank 1


@pytest.mark.parametrize("kind", ["stage1", "stage2", "stage3"])
def test_starts_again_from_the_one_before_it(kind: str, tmp_path: Path) -> None:
    (saved,) = on_ranks("save", tmp_path, NEWEST, "hook", kind)
    assert (saved["latest"], all(saved["codes"])) == ("first", True)
    found = sorted(on_ranks("resume", tmp_path, NEWEST, "hook", kind), key=lambda one: int(one["rank"]))
    assert found == [{"rank": rank, "error": "", "tag": "first", "no moments": False} for rank in range(2)]


def of_whole_save(out: Path, differs: dict[int, dict[str, str]]) -> list[list[str]]:
    """The error of each rank; some have other environment variables."""
    port = str(free_port())

    def one(rank: int) -> list[str]:
        env = {"RANK": str(rank), "MASTER_PORT": port, **differs.get(rank, {})}
        on: dict[str, Any] = {"tree": tree("deepspeed", NEWEST), "delivery": "hook", "env": env}
        return [line["error"] for line in run_lines("latest_too_early", "whole", out, "stage1", **on)]

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


@pytest.mark.slow
def test_a_rank_that_is_late_is_waited_for(tmp_path: Path) -> None:
    """A rank may reach the save after the other's check: it announces the fix when it creates the engine."""
    assert of_whole_save(tmp_path, {1: {"LATEST_TOO_EARLY_LATE": "35"}}) == [[""], [""]]


@pytest.mark.parametrize("without", [{"CKPT_PATCHES_SKIP": FIX}, {"CKPT_PATCHES": "off"}], ids=["skipped", "off"])
@pytest.mark.parametrize("lacks", [[], [0], [1]], ids=["none lacks it", "the first lacks it", "the second lacks it"])
def test_ranks_of_which_one_lacks_it_are_told_so(lacks: list[int], without: dict[str, str], tmp_path: Path) -> None:
    """Each rank with the fix gets an error, instead of waiting forever."""
    errors = of_whole_save(tmp_path, dict.fromkeys(lacks, without))
    if not lacks:
        assert errors == [[""], [""]]
    for rank in {0, 1} - set(lacks):
        assert not lacks or errors[rank][0].startswith(f"{FIX}: 1 of 2 ranks have it, rank {lacks[0]} has not")


FAKE = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from ckpt_patches.engine.fix import load
fix = load("latest_after_all_ranks").edits[-1].function.__globals__
fix["torch"] = torch
fix["_announce_barrier"]()
for store in (FakeStore(), dist.HashStore()):
    dist.init_process_group("fake", store=store, rank=0, world_size=8)
    fix["_announce_barrier"]()
    fix["_check_all_ranks_have_barrier"]()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_dry_run_without_other_ranks_is_not_stopped(tmp_path: Path) -> None:
    """A job with fake ranks, or without a process group, runs without an error."""
    (tmp_path / "fake.py").write_text(FAKE)
    run(tmp_path / "fake.py", tree=tree("deepspeed", NEWEST), imports=("torch",))


# What the ranks run

RANKS = 2
LATE = 2.0  # seconds for the other rank to write all that it writes without this one
WHOLE, CUT = "first", "second"


def bug(folder: Path) -> str:
    with contextlib.suppress(RankError):  # from the killed rank, or from the one that waits for it
        dt.results(save_twice, RANKS, folder)
    files = [len(list((folder / tag).glob("*_optim_states.pt"))) for tag in (WHOLE, CUT)]
    assert files == [2, 1], f"expected 2 files in {WHOLE} and 1 in {CUT}, found {files}"
    return "" if (folder / "latest").read_text() == WHOLE else "`latest` names a checkpoint without the files of rank 1"


def save_twice(rank: int, folder: Path) -> None:
    run = dt.engine_of("stage1-2", RANKS, universal=False, seed=0)
    dt.train(run, rank, RANKS, first=0)
    run.save_checkpoint(str(folder), tag=WHOLE)
    if rank == 1:
        run.checkpoint_engine.save = die
    run.save_checkpoint(str(folder), tag=CUT)


def die(state: object, path: str, *args: object, **keywords: object) -> None:
    while not list(Path(path).parent.glob("*_optim_states.pt")):  # the other rank's file
        time.sleep(0.05)
    time.sleep(LATE)
    os._exit(3)
