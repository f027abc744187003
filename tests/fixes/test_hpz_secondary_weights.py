"""hpz_secondary_weights: after a load with hpZ the next step gathers the loaded weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from upstream import affected, newest_affected, run_json, shown, tree, with_fix, without_fix

RELEASES = affected("hpz_secondary_weights")


@without_fix(RELEASES)
def test_the_next_loss_is_another_one(version: str, delivery: str) -> None:
    assert "and no error" in shown(__file__, version, delivery)


@with_fix(RELEASES)
def test_a_resume_goes_on_bit_for_bit(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# Further cases

FIX = "hpz_secondary_weights"
NEWEST = newest_affected(FIX)[1]
# The last release that drops no secondary partition after a load, and the first that drops trained parameters'.
NONE, TRAINED = "0.18.2", "0.18.3"
LOADS = ("all", "module", "weights", "universal")


def right(version: str, fixed: bool, folder: Path, *arguments: str) -> list[str]:
    """The loads after which the loss equals the saved run's, with all other fixes on."""
    root, env = tree("deepspeed", version), {} if fixed else {"CKPT_PATCHES_SKIP": FIX}
    found = run_json("hpz_loads", folder, *arguments, tree=root, delivery="hook", env=env)
    expected = found.pop("expected")
    assert list(found) == [argument for argument in arguments if argument in LOADS]
    return [name for name, loss in found.items() if loss == expected]


@pytest.mark.parametrize("fixed", [False, True])
def test_every_load(fixed: bool, tmp_path: Path) -> None:
    """Every load is right with the fix; without it, since 0.18.3, only loads into gathered parameters are."""
    assert right(NEWEST, fixed, tmp_path, *LOADS) == (list(LOADS) if fixed else ["module", "weights"])


def test_persistent_parameters_are_gathered_from_what_was_loaded(tmp_path: Path) -> None:
    """Every load is right: their secondary partitions are not read, so dropping them has no effect."""
    assert right(NEWEST, True, tmp_path, *LOADS, "--persistent") == list(LOADS)


@pytest.mark.parametrize("fixed", [False, True])
def test_every_load_where_no_load_renews_them(fixed: bool, tmp_path: Path) -> None:
    assert right(NONE, fixed, tmp_path, *LOADS) == (list(LOADS) if fixed else [])


@pytest.mark.parametrize(
    ("version", "fixed", "expected"), [(NONE, False, []), (NONE, True, ["all"]), (TRAINED, False, ["all"])]
)
def test_trained_parameters(version: str, fixed: bool, expected: list[str], tmp_path: Path) -> None:
    assert right(version, fixed, tmp_path, "all", "--trained") == expected


# What the ranks run

RANKS, NODE = 4, 2


class Adapted(torch.nn.Module):
    """No parameter needs padding: up to 0.13.4 padded secondary partitions are copied only in part."""

    def __init__(self) -> None:
        from trainers import deepspeed_training as dt

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
    from trainers import deepspeed_training as dt

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
    from trainers import deepspeed_training as dt

    torch.manual_seed(seed)
    model = Adapted()
    model.base.requires_grad_(not frozen)
    groups = [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]
    return dt.initialize("stage3_hpz", RANKS, model, groups, universal)


def bug(folder: Path) -> str:
    from trainers import deepspeed_training as dt

    dt.allow_pickles()
    return str(dt.results(resume, RANKS, folder, node=NODE)[0])
