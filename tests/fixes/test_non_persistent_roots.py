"""non_persistent_roots: a restart with `--load A --save B` finds the non-persistent checkpoints that the run wrote."""

from pathlib import Path
from typing import Any

import pytest

from upstream import affected, called, newest_affected, with_fix, without_fix

FIX = "non_persistent_roots"
AFFECTED = affected(FIX)
NEWEST = newest_affected(FIX)[1]


def restarted(version: str, delivery: str, function: str = "restart") -> Any:
    """The iterations at which a run starts first, and after it was killed, and whose states it has."""
    return called(__file__, function, version=version, delivery=delivery, layout=[2])[0]


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
@pytest.mark.parametrize("function", ["restart_beside_an_old_one", "restart_at_a_step", "restart_beside_garbage"])
def test_what_is_below_load_is_loaded_as_before(function: str, delivery: str) -> None:
    assert restarted(NEWEST, delivery, function) == [3, 3, 3]


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


def restart_beside_an_old_one(rank: int, folder: Path) -> list[int | None]:
    """`--save` has a non-persistent checkpoint of another run, at the iteration that `--load` has."""
    return start_of_two(folder, 3)


def restart_at_a_step(rank: int, folder: Path) -> list[int | None]:
    return start_of_two(folder, 6, ckpt_step=3)


def restart_beside_garbage(rank: int, folder: Path) -> list[int | None]:
    """A save was interrupted when it wrote the tracker."""
    return start_of_two(folder, 6, tracker="")


def start_of_two(folder: Path, other: int, tracker: str | None = None, **more: Any) -> list[int | None]:
    """Start with `--load A --save B`, of which B has a non-persistent checkpoint of another run. Twice the same."""
    import lm_run

    a, b = folder / "A", folder / "B"
    first = lm_run.start(a)
    first.train(1, 3)
    first.save(3)
    saved = {3: first.state()}
    stale = lm_run.start(b, non_persistent_ckpt_type="global")
    stale.train(20, 20 + other)
    stale.save(other, non_persistent_ckpt=True)
    if tracker is not None:
        (b / "non_persistent" / "latest_checkpointed_iteration.txt").write_text(tracker)
    run = lm_run.start(folder, load=str(a), save=str(b), non_persistent_ckpt_type="global", **more)
    return [run.load(), run.load(), run.is_at(saved)]


def restart_behind_load(rank: int, folder: Path) -> list[int | None]:
    """`--load` has a newer non-persistent checkpoint than `--save`."""
    return restart(rank, folder, 9)


def restart_finetuning(rank: int, folder: Path) -> list[int | None]:
    return restart(rank, folder, finetune=True)
