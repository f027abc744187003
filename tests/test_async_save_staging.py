"""async_save_staging: an asynchronous save of the real megatron-core writes what was there when it was asked for."""

from pathlib import Path
from typing import Any

import pytest

import edits
from upstream import affected, newest, newest_by_default, numbers, releases, run_json, tree, with_fix, without_fix

FIX = "async_save_staging"
AFFECTED = affected(FIX)
ENDED = (
    "RuntimeError: expected the process that writes checkpoints to finish its save, found it ended with exit code -9"
)


def saving(version: str, delivery: str, what: str, folder: Path) -> dict[str, Any]:
    return on(version, delivery, what, folder / what)


def on(version: str, delivery: str, what: str, out: Path) -> dict[str, Any]:
    root = tree("megatron-core", version)
    found: dict[str, Any] = run_json("async_saving", out, what, tree=root, delivery=delivery)
    return found


def holds_staged_tensors(version: str) -> bool:
    """By itself, since Megatron-LM#2288."""
    return numbers(version) >= (0, 17)


@without_fix(FIX, AFFECTED)
def test_upstream_saves_what_a_later_step_has_put_there(version: str, delivery: str, tmp_path: Path) -> None:
    held = saving(version, delivery, "held", tmp_path)
    assert held == {"while writing": holds_staged_tensors(version), "after": False}
    assert saving(version, delivery, "stepped", tmp_path) == {"elements of the next step": 5000}


@with_fix(FIX, AFFECTED)
def test_a_save_writes_what_was_there_when_it_was_asked_for(version: str, delivery: str, tmp_path: Path) -> None:
    assert saving(version, delivery, "held", tmp_path) == {"while writing": True, "after": False}
    assert saving(version, delivery, "stepped", tmp_path) == {"elements of the next step": 0}


@pytest.mark.slow
@pytest.mark.parametrize(("saves", "loads"), [("hook", "none"), ("none", "hook")])
@pytest.mark.parametrize("version", newest_by_default(releases("megatron-core", oldest="0.13.0")))
def test_a_checkpoint_loads_whether_the_fix_was_there_or_not(
    version: str, saves: str, loads: str, tmp_path: Path
) -> None:
    """The files are those of upstream; up to 0.12 it cannot write them with a current torch."""
    on(version, saves, "save", tmp_path / "checkpoint")
    assert on(version, loads, "load", tmp_path / "checkpoint") == {"as saved": True}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["killed", "gone"])
@pytest.mark.parametrize("version", newest_by_default(AFFECTED))
def test_the_end_of_a_worker_is_told(version: str, what: str, tmp_path: Path) -> None:
    """While it writes, and while it stages; upstream waits."""
    assert saving(version, "none", what, tmp_path) == {"said": "TimeoutError: waits"}
    assert saving(version, "hook", what, tmp_path)["said"].startswith(ENDED)


def test_another_wait_for_the_worker_is_left_alone(tmp_path: Path) -> None:
    copy = edits.copy_of(tree("megatron-core", newest("megatron-core")), FIX, tmp_path)
    module = "megatron.core.dist_checkpointing.strategies.async_utils"
    edits.check_left_alone(copy, FIX, module, "_persistent_preload_q.join()", "_persistent_preload_q.wait()")
