"""async_save_staging: an asynchronous save of the real megatron-core writes the state at the time of the call."""

from pathlib import Path
from typing import Any

import pytest

from trainers.async_saving import held, load, save, stepped  # noqa: F401  which `saving` calls
from upstream import affected, called, newest_by_default, numbers, releases, with_fix, without_fix

FIX = "async_save_staging"
AFFECTED = affected(FIX)


def saving(version: str, delivery: str, function: str, out: Path) -> Any:
    return called(__file__, function, version=version, delivery=delivery, folder=out, layout=[1])[0]


def holds_staged_tensors(version: str) -> bool:
    """Whether upstream itself holds them, since Megatron-LM#2288."""
    return numbers(version) >= (0, 17)


@without_fix(AFFECTED)
def test_upstream_saves_what_a_later_step_has_put_there(version: str, delivery: str, tmp_path: Path) -> None:
    kept = {"while writing": holds_staged_tensors(version), "after": False}
    assert saving(version, delivery, "held", tmp_path / "held") == kept
    assert saving(version, delivery, "stepped", tmp_path / "stepped") == 5000


@with_fix(AFFECTED)
def test_a_save_writes_what_was_there_when_it_was_asked_for(version: str, delivery: str, tmp_path: Path) -> None:
    assert saving(version, delivery, "held", tmp_path / "held") == {"while writing": True, "after": False}
    assert saving(version, delivery, "stepped", tmp_path / "stepped") == 0


@pytest.mark.slow
@pytest.mark.parametrize(("saves", "loads"), [("hook", "none"), ("none", "hook")])
@pytest.mark.parametrize("version", newest_by_default(releases("megatron-core", oldest="0.13.0")))
def test_a_checkpoint_loads_whether_the_fix_was_there_or_not(
    version: str, saves: str, loads: str, tmp_path: Path
) -> None:
    """Checkpoints with and without the fix load in both directions. Up to 0.12, current torch cannot save them."""
    saving(version, saves, "save", tmp_path / "checkpoint")
    assert saving(version, loads, "load", tmp_path / "checkpoint") is True
