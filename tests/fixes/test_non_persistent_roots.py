"""non_persistent_roots: a restart with `--load A --save B` finds the non-persistent checkpoints that the run wrote."""

from pathlib import Path
from typing import Any

import pytest

from upstream import affected, newest_affected, run_json, tree, with_fix, without_fix

FIX = "non_persistent_roots"
AFFECTED = affected(FIX)
NEWEST = newest_affected(FIX)[1]


def restarted(version: str, delivery: str, function: str = "restart") -> Any:
    """The iterations at which a run starts first, and after it was killed, and whose states it has."""
    return run_json("proof", __file__, function, "2", tree=tree("megatron-core", version), delivery=delivery)[0]


@without_fix(AFFECTED)
def test_a_restart_goes_back_to_the_first_start(version: str, delivery: str) -> None:
    assert restarted(version, delivery) == [3, 3, 3]


@with_fix(AFFECTED)
def test_a_restart_goes_on_from_what_the_run_saved(version: str, delivery: str) -> None:
    assert restarted(version, delivery) == [3, 6, 6]


@pytest.mark.parametrize("delivery", ["none", "hook"])
def test_newer_ones_below_load_are_loaded(delivery: str) -> None:
    assert restarted(NEWEST, delivery, "restart_behind_load") == [9, 9, 9]


@pytest.mark.parametrize("delivery", ["none", "hook"])
def test_finetuning_begins_with_load(delivery: str) -> None:
    assert restarted(NEWEST, delivery, "restart_finetuning") == [0, 0, 3]


# What the ranks run


def restart(rank: int, folder: Path, first: int = 3, *, finetune: bool = False) -> list[int | None]:
    import lm_run

    a, b = folder / "A", folder / "B"
    start: dict[str, Any] = {"load": str(a), "save": str(b), "non_persistent_ckpt_type": "global", "finetune": finetune}
    before = lm_run.start(a, non_persistent_ckpt_type="global")
    before.train(1, first)
    before.save(first, non_persistent_ckpt=first > 3)
    saved = {first: before.state()}
    run = lm_run.start(folder, **start)
    begun = run.load()
    run.train(4, 6)
    run.save(6, non_persistent_ckpt=True)
    saved[6] = run.state()
    again = lm_run.start(folder, **start)
    found = again.load()
    return [begun, found, again.is_at(saved, weights=finetune)]


def restart_behind_load(rank: int, folder: Path) -> list[int | None]:
    """`--load` has a newer non-persistent checkpoint than `--save`."""
    return restart(rank, folder, 9)


def restart_finetuning(rank: int, folder: Path) -> list[int | None]:
    return restart(rank, folder, finetune=True)
