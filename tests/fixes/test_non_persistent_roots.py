"""non_persistent_roots: a restart with `--load A --save B` finds the non-persistent checkpoints that the run wrote."""

from pathlib import Path
from typing import Any

import pytest

from trainers.lazy import megatron_lm
from upstream import called, newest_affected, outcomes

# The iterations at which a run starts first, and after it was killed, and whose states it has.
test_a_restart_goes_back_to_the_first_start, test_a_restart_goes_on_from_what_the_run_saved = outcomes(
    __file__, "restart", [3, 3, 3], [3, 6, 6], rank=0, layout=[2]
)


@pytest.mark.parametrize("delivery", ["none", "hook"])
@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        ("restart", (9,), [9, 9, 9]),  # `--load` has a newer non-persistent checkpoint than `--save`
        ("restart", (3, True), [0, 0, 3]),  # finetuning begins with load
        # `--save` has a non-persistent checkpoint of another run, at the iteration that `--load` has.
        ("start_of_two", (3,), [3, 3, 3]),
        ("start_of_two", (6, None, 3), [3, 3, 3]),  # at a step
        ("start_of_two", (6, ""), [3, 3, 3]),  # a save was interrupted when it wrote the tracker
    ],
)
def test_what_is_below_load_is_loaded_as_before(
    function: str, arguments: tuple[Any, ...], expected: list[int], delivery: str
) -> None:
    version = newest_affected("non_persistent_roots")[1]
    on: dict[str, Any] = {"version": version, "delivery": delivery, "layout": [2]}
    assert called(__file__, function, *arguments, **on)[0] == expected


# What the ranks run


def restart(rank: int, folder: Path, first: int = 3, finetune: bool = False) -> list[int | None]:
    a, b = folder / "A", folder / "B"
    start: dict[str, Any] = {"load": str(a), "save": str(b), "non_persistent_ckpt_type": "global", "finetune": finetune}
    before = megatron_lm.begin(a, non_persistent_ckpt_type="global")
    before.train(1, first)
    before.save(first, non_persistent_ckpt=first > 3)
    saved = {first: before.state()}
    run = megatron_lm.begin(folder, **start)
    begun = run.load()
    run.train(4, 6)
    run.save(6, non_persistent_ckpt=True)
    saved[6] = run.state()
    again = megatron_lm.begin(folder, **start)
    found = again.load()
    return [begun, found, again.is_at(saved, weights=finetune)]


def start_of_two(
    rank: int, folder: Path, other: int, tracker: str | None = None, step: int | None = None
) -> list[int | None]:
    """Start with `--load A --save B`, of which B has a non-persistent checkpoint of another run. Twice the same."""
    a, b = folder / "A", folder / "B"
    first = megatron_lm.begin(a)
    first.train(1, 3)
    first.save(3)
    saved = {3: first.state()}
    stale = megatron_lm.begin(b, non_persistent_ckpt_type="global")
    stale.train(20, 20 + other)
    stale.save(other, non_persistent_ckpt=True)
    if tracker is not None:
        (b / "non_persistent" / "latest_checkpointed_iteration.txt").write_text(tracker)
    run = megatron_lm.begin(folder, load=str(a), save=str(b), non_persistent_ckpt_type="global", ckpt_step=step)
    return [run.load(), run.load(), run.is_at(saved)]
