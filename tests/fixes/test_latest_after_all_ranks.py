"""latest_after_all_ranks: `latest` names a checkpoint only after all ranks have written theirs."""

import contextlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trainers.lazy import dt
from trainers.ranks import RankError, free_port, patience
from upstream import called, newest_affected, proof, run, tree

test_latest_names_a_checkpoint_that_a_killed_rank_has_not_written, test_latest_names_the_checkpoint_before_it = proof(
    __file__, "`latest` names a checkpoint without the files of rank 1"
)


# Further cases

FIX = "latest_after_all_ranks"

NEWEST = newest_affected(FIX)[1]


@pytest.mark.parametrize("kind", ["stage2", "stage3"])
def test_with_the_other_stages(kind: str) -> None:
    assert called(__file__, "bug", f"{kind}-1", version=NEWEST, delivery="hook") == ""


def of_whole_save(out: Path, differs: dict[int, dict[str, str]]) -> list[str]:
    """The error of each rank, a process of its own; some have other environment variables."""
    port = free_port()

    def one(rank: int) -> str:
        # An interpreter of its own: a fork server runs one program at a time.
        on: dict[str, Any] = {"version": NEWEST, "delivery": "hook", "env": differs.get(rank, {}), "imports": ()}
        return str(called(__file__, "save_whole", rank, port, folder=out, **on))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


@pytest.mark.slow
def test_a_rank_that_is_late_is_waited_for(tmp_path: Path) -> None:
    """A rank may reach the save after the other's check: it announces the fix when it creates the engine."""
    assert of_whole_save(tmp_path, {1: {"LATE_BY": "35"}}) == ["", ""]


@pytest.mark.parametrize("without", [{"CKPT_PATCHES_SKIP": FIX}, {"CKPT_PATCHES": "off"}], ids=["skipped", "off"])
@pytest.mark.parametrize("lacks", [[], [0], [1]], ids=["none lacks it", "the first lacks it", "the second lacks it"])
def test_ranks_of_which_one_lacks_it_are_told_so(lacks: list[int], without: dict[str, str], tmp_path: Path) -> None:
    """Each rank with the fix gets an error, instead of waiting forever."""
    errors = of_whole_save(tmp_path, dict.fromkeys(lacks, without))
    if not lacks:
        assert errors == ["", ""]
    for rank in {0, 1} - set(lacks):
        assert not lacks or errors[rank].startswith(f"{FIX}: 1 of 2 ranks have it, rank {lacks[0]} has not")


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


def bug(folder: Path, case: str = "stage1-2") -> str:
    with contextlib.suppress(RankError):  # from the killed rank, or from the one that waits for it
        dt.results(save_twice, RANKS, folder, case)
    files = [len(list((folder / tag).glob("*_optim_states.pt"))) for tag in (WHOLE, CUT)]
    assert files == [2, 1], f"expected 2 files in {WHOLE} and 1 in {CUT}, found {files}"
    if (folder / "latest").read_text() != WHOLE:
        return "`latest` names a checkpoint without the files of rank 1"
    return next(filter(None, dt.results(start_again, RANKS, folder, case)), "")


def save_twice(rank: int, folder: Path, case: str) -> None:
    run = dt.engine_of(case, RANKS, universal=False, seed=0)
    dt.train(run, rank, RANKS, first=0)
    run.save_checkpoint(str(folder), tag=WHOLE)
    if rank == 1:
        run.checkpoint_engine.save = die
    run.save_checkpoint(str(folder), tag=CUT)


def start_again(rank: int, folder: Path, case: str) -> str:
    dt.allow_pickles()
    run = dt.engine_of(case, RANKS, universal=False, seed=1)
    path, _ = run.load_checkpoint(str(folder))
    moments = [state["exp_avg"] for state in run.optimizer.optimizer.state.values() if "exp_avg" in state]
    is_there = Path(path).parent.name == WHOLE and any(bool(moment.any()) for moment in moments)
    return "" if is_there else f"a restart from {path} has no moments"


def die(state: object, path: str, *args: object, **keywords: object) -> None:
    while not list(Path(path).parent.glob("*_optim_states.pt")):  # the other rank's file
        time.sleep(0.05)
    time.sleep(LATE)
    os._exit(3)


def save_whole(folder: Path, rank: int, port: int) -> None:
    """Save as one of two ranks, and print its error."""
    dt.prepare()
    dt.join(rank, RANKS, RANKS, port)
    run, error = dt.engine_of("stage1", RANKS, universal=False), ""
    time.sleep(float(os.environ.get("LATE_BY", "0")))
    try:
        run.save_checkpoint(str(folder), tag=WHOLE)
    except RuntimeError as raised:
        error = str(raised).splitlines()[0]
    print(f"\n{json.dumps(error)}", flush=True)
    time.sleep(patience(1))  # rank 0 holds the store, which the other rank reads at the same time
    os._exit(0)  # as a job with a failed rank ends
