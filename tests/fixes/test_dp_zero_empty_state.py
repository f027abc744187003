"""dp_zero_empty_state: the real megatron-core saves an empty optimizer state; lost entries are an error."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from trainers.lazy import mt
from upstream import affected, called, checkpoint_formats, newest_affected, releases, shown, with_fix, without_fix

FIX = "dp_zero_empty_state"
ALL = affected(FIX)
NEWEST = newest_affected(FIX)[1]
LOST, NO_STEP = "lost from the optimizer state", "KeyError: 'step: lost from the state"


def resumed(
    version: str,
    delivery: str,
    folder: Path,
    *formats: str,
    inner: str = "fused",
    steps: int = 0,
    lose: str = "",
    **options: Any,
) -> dict[str, str]:
    """By format, all or these, what differs after a save, a load and two steps, or the error; "" if nothing."""
    arguments = (formats or checkpoint_formats(version), inner, steps, lose, options)
    found: dict[str, str] = called(
        __file__, "resume_each", *arguments, version=version, delivery=delivery, folder=folder
    )
    return found


def exact(version: str) -> dict[str, str]:
    return dict.fromkeys(checkpoint_formats(version), "")


def keys_of_bucket(folder: Path) -> list[str]:
    """The keys in the first bucket of the first buffer in a checkpoint in the format `torch`."""
    parameters = torch.load(folder / "torch" / "checkpoint" / "distrib_optim.pt")
    return sorted(map(str, next(iter(next(v for v in parameters.values() if isinstance(v, dict)).values()))))


@without_fix(ALL)
def test_upstream_fails_to_save_an_empty_state(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == "KeyError: 'exp_avg'"


@with_fix(ALL)
def test_an_empty_state_is_saved_and_resumed_bit_for_bit_in_every_format(
    version: str, delivery: str, tmp_path: Path
) -> None:
    assert resumed(version, delivery, tmp_path) == exact(version)
    assert keys_of_bucket(tmp_path) == ["exp_avg", "exp_avg_sq", "numel_unpadded", "param"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"inner": "torch"}, {"precision_aware": True}, {"fp16": True}], ids=str)
@pytest.mark.parametrize("version", releases("megatron-core", oldest="0.14.0"))
def test_for_every_inner_optimizer(version: str, options: dict[str, Any], tmp_path: Path) -> None:
    assert resumed(version, "hook", tmp_path, **options) == exact(version)


@pytest.mark.slow
@pytest.mark.parametrize("precision_aware", [False, True])
def test_under_hybrid_cpu_offload(precision_aware: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"inner": "torch", "offload_fraction": 0.5, "precision_aware": precision_aware}
    assert resumed(NEWEST, "none", tmp_path / "none", "torch", **options)["torch"].startswith("KeyError")
    assert resumed(NEWEST, "hook", tmp_path / "hook", **options) == exact(NEWEST)
    assert keys_of_bucket(tmp_path / "hook") == ["exp_avg", "exp_avg_sq", "numel_unpadded", "param"]


def test_skipped_fp16_steps_leave_an_empty_state_that_is_no_loss(tmp_path: Path) -> None:
    """An empty state is saved after skipped steps: they overflow, as the loss scale starts at 2^32."""
    found = resumed(NEWEST, "hook", tmp_path, "torch", fp16=True, steps=2, lose="nothing")
    assert found == {"torch": "saved"}


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["fused", "torch"])
@pytest.mark.parametrize("lose", ["moment", "parameter", "all"])
def test_a_lost_state_is_an_error(lose: str, inner: str, tmp_path: Path) -> None:
    formats = ("torch", "dp_reshardable", "fully_reshardable")
    found = resumed(NEWEST, "hook", tmp_path, *formats, steps=2, lose=lose, inner=inner)
    moments = f"KeyError: '{'exp_avg_sq' if lose == 'moment' else 'exp_avg, exp_avg_sq'}: {LOST}"
    for name in formats:
        # torch's Adam has a step in each state: if it is saved first, it is found missing first.
        is_step_first = (lose, inner) == ("all", "torch") and name != "torch"
        assert found[name].startswith(NO_STEP if is_step_first else moments), name


# What the ranks run


def bug(folder: Path) -> str:
    return resume_each(folder, ["torch"], "fused", 0, "", {})["torch"]


def resume_each(
    folder: Path, formats: list[str], inner: str, steps: int, lose: str, options: dict[str, Any]
) -> dict[str, str]:
    from trainers.ranks import RankError

    found = {}
    for name in formats:
        try:
            found[name] = mt.results(resume, 2, folder / name, name, inner, steps, lose, options)[0]
        except RankError as error:
            found[name] = str(error)
    return found


def resume(rank: int, folder: Path, name: str, inner: str, steps: int, lose: str, options: dict[str, Any]) -> str:
    if not lose:
        return mt.resume(rank, name, folder, partial(mt.build, **options), steps, inner)
    mt.use_inner_optimizer(inner)
    model, optimizer = mt.build(**options)
    for iteration in range(steps):
        mt.step(model, optimizer, iteration)
    remove(mt.inner(optimizer).optimizer.state, lose)
    mt.save(name, model, optimizer, folder)
    return "saved"


def remove(state: Any, what: str) -> None:
    """Remove entries from each rank's state: one moment of one parameter, one parameter's moments, or all."""
    if what == "all":
        state.clear()
    elif what == "moment":
        del state[next(iter(state))]["exp_avg_sq"]
    elif what == "parameter":
        state[next(iter(state))].clear()
