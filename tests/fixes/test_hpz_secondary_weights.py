"""hpz_secondary_weights: after a load with hpZ the next step gathers the loaded weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from trainers.lazy import dt
from upstream import called, newest_affected, proof

test_the_next_loss_is_another_one, test_a_resume_goes_on_bit_for_bit = proof(__file__, "and no error")


# Further cases

FIX = "hpz_secondary_weights"
NEWEST = newest_affected(FIX)[1]
# The last release that drops no secondary partition after a load, and the first that drops trained parameters'.
NONE, TRAINED = "0.18.2", "0.18.3"
LOADS: dict[str, dict[str, bool]] = {
    "all": {},
    "module": {"load_module_only": True},
    "weights": {"load_optimizer_states": False},
    "universal": {},  # enabled by a setting
}


def right(version: str, fixed: bool, *loads: str, **options: bool) -> list[str]:
    """The loads after which the loss equals the saved run's, with all other fixes on."""
    env = {} if fixed else {"CKPT_PATCHES_SKIP": FIX}
    found = called(__file__, "losses_after", loads, options, version=version, delivery="hook", env=env)
    expected = found.pop("expected")
    assert list(found) == list(loads)
    return [name for name, loss in found.items() if loss == expected]


@pytest.mark.parametrize(
    ("version", "fixed", "options", "loads", "expected"),
    [
        (NEWEST, True, {}, LOADS, [*LOADS]),
        (NEWEST, False, {}, LOADS, ["module", "weights"]),  # since 0.18.3, loads into gathered parameters alone
        (NEWEST, True, {"persistent": True}, LOADS, [*LOADS]),  # these are gathered from what was loaded
        (NONE, True, {}, LOADS, [*LOADS]),
        (NONE, False, {}, LOADS, []),
        (NONE, True, {"trained": True}, ["all"], ["all"]),
        (NONE, False, {"trained": True}, ["all"], []),
        (TRAINED, False, {"trained": True}, ["all"], ["all"]),
    ],
)
def test_every_load(version: str, fixed: bool, options: dict[str, bool], loads: Any, expected: list[str]) -> None:
    assert right(version, fixed, *loads, **options) == expected


# What the ranks run

RANKS, NODE = 4, 2


class Adapted(torch.nn.Module):
    """No parameter needs padding: up to 0.13.4 padded secondary partitions are copied only in part."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(dt.HIDDEN, 4)
        self.adapter = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.adapter(torch.tanh(self.base(x)))
        return output


def resume(rank: int, folder: Path) -> str:
    """Train, save, load into a run with other weights, and take two steps in both. Returns what differs, or "".

    The weights are not gathered before: up to 0.14.2 that refreshes the secondary partitions.
    """
    run = engine(seed=0)
    dt.train(run, rank, RANKS, first=0)
    dt.save(run, folder)
    losses = dt.train(run, rank, RANKS, first=dt.STEPS)
    end = dt.snapshot(run)
    resumed = engine(seed=1)
    dt.load(resumed, folder, dt.TAG)
    found = dt.train(resumed, rank, RANKS, first=dt.STEPS)
    wrong = dt.on_any_rank(dt.differences(dt.snapshot(resumed), end))
    if found == losses and not wrong:
        return ""
    loss = f"the next loss is {found[0]:.4f} for {losses[0]:.4f}"
    return f"{loss}, {len(wrong)} of {len(end)} states differ after {dt.STEPS} steps more, and no error"


def engine(seed: int, universal: bool = False, frozen: bool = True) -> Any:
    torch.manual_seed(seed)
    model = Adapted()
    model.base.requires_grad_(not frozen)
    groups = [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]
    return dt.initialize("stage3_hpz", RANKS, model, groups, universal)


def bug(folder: Path) -> str:
    dt.allow_pickles()
    return str(dt.results(resume, RANKS, folder, node=NODE)[0])


def losses_after(folder: Path, loads: list[str], options: dict[str, bool]) -> dict[str, float]:
    """The next loss of the saved run, as `expected`, and of a run with other weights after each load.

    Options: `persistent` parameters are not partitioned between their uses; all are `trained`.
    """
    if options.get("persistent"):
        dt.KINDS["stage3_hpz"]["zero_optimization"]["stage3_param_persistence_threshold"] = 1000
    dt.allow_pickles()
    found: dict[str, float] = dt.results(losses, RANKS, folder, loads, not options.get("trained"), node=NODE)[0]
    return found


def losses(rank: int, folder: Path, loads: list[str], frozen: bool) -> dict[str, float]:
    saved = engine(seed=0, frozen=frozen)
    dt.train(saved, rank, RANKS, first=0)
    dt.save(saved, folder)
    if "universal" in loads:
        dt.convert(folder)
    found = {"expected": dt.train(saved, rank, RANKS, first=dt.STEPS)[0]}
    for name in loads:
        run = engine(seed=1, universal=name == "universal", frozen=frozen)
        dt.load(run, folder, dt.UNIVERSAL if name == "universal" else dt.TAG, **LOADS[name])
        found[name] = dt.train(run, rank, RANKS, first=dt.STEPS)[0]
    return found
