"""dp_zero_empty_state: the real megatron-core saves an empty optimizer state; lost entries are an error."""

from pathlib import Path
from typing import Any

import pytest

from upstream import affected, checkpoint_formats, newest_affected, releases, run_lines, tree, with_fix, without_fix

FIX = "dp_zero_empty_state"
ALL = affected(FIX)
NEWEST = newest_affected(FIX)[1]


def save_and_resume(
    version: str, delivery: str, tmp_path: Path, *options: str, only: tuple[str, ...] = ()
) -> dict[str, dict[str, Any]]:
    """The results of save and resume on all ranks, by format."""
    names = [name for name in checkpoint_formats(version) if not only or name in only]
    lines = run_lines(
        "empty_state",
        tmp_path / "out",
        "--formats",
        ",".join(names),
        *options,
        tree=tree("megatron-core", version),
        delivery=delivery,
        check=delivery != "none",
    )
    return {line["format"]: line for line in lines}


@without_fix(ALL)
def test_upstream_fails_to_save_an_empty_state(version: str, delivery: str, tmp_path: Path) -> None:
    found = save_and_resume(version, delivery, tmp_path, only=("torch",))
    assert found["torch"]["error"] == "save: KeyError: 'exp_avg'"


@with_fix(ALL)
def test_an_empty_state_is_saved_and_resumed_bit_for_bit_in_every_format(
    version: str, delivery: str, tmp_path: Path
) -> None:
    found = save_and_resume(version, delivery, tmp_path)
    assert {name: (line["error"], line["resume"]) for name, line in found.items()} == dict.fromkeys(
        checkpoint_formats(version), ("", "bit-equal")
    )
    assert found["torch"]["keys"] == ["exp_avg", "exp_avg_sq", "numel_unpadded", "param"]


@pytest.mark.slow
@pytest.mark.parametrize("inner", [("--inner", "torch"), ("--precision-aware",), ("--fp16",)], ids=" ".join)
@pytest.mark.parametrize("version", releases("megatron-core", oldest="0.14.0"))
def test_for_every_inner_optimizer(version: str, inner: tuple[str, ...], tmp_path: Path) -> None:
    found = save_and_resume(version, "hook", tmp_path, *inner)
    assert {name: (line["error"], line["resume"]) for name, line in found.items()} == dict.fromkeys(
        checkpoint_formats(version), ("", "bit-equal")
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision_aware", [(), ("--precision-aware",)], ids=["", "precision-aware"])
def test_under_hybrid_cpu_offload(precision_aware: tuple[str, ...], tmp_path: Path) -> None:
    options = ("--inner", "torch", "--offload-fraction", "0.5", *precision_aware)
    died = save_and_resume(NEWEST, "none", tmp_path / "none", *options, only=("torch",))["torch"]["error"]
    assert died.startswith("save: KeyError")
    found = save_and_resume(NEWEST, "hook", tmp_path / "hook", *options)
    assert {line["resume"] for line in found.values()} == {"bit-equal"}
    assert found["torch"]["keys"] == ["exp_avg", "exp_avg_sq", "numel_unpadded", "param"]


def test_skipped_fp16_steps_leave_an_empty_state_that_is_no_loss(tmp_path: Path) -> None:
    """An empty state is saved after skipped steps: they overflow, as the loss scale starts at 2^32."""
    found = save_and_resume(NEWEST, "hook", tmp_path, "--fp16", "--steps", "2", only=("torch",))
    assert found["torch"]["error"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["fused", "torch"])
@pytest.mark.parametrize("lose", ["moment", "parameter", "all"])
def test_a_lost_state_is_an_error(lose: str, inner: str, tmp_path: Path) -> None:
    only = ("torch", "dp_reshardable", "fully_reshardable")
    found = save_and_resume(NEWEST, "hook", tmp_path, "--steps", "2", "--lose", lose, "--inner", inner, only=only)
    lost = "exp_avg_sq" if lose == "moment" else "exp_avg, exp_avg_sq"
    moments, step = (
        f"save: KeyError: '{lost}: lost from the optimizer state",
        "save: KeyError: 'step: lost from the state",
    )
    for name in only:
        # torch's Adam has a step in each state: if it is saved first, it is found missing first.
        is_step_first = (lose, inner) == ("all", "torch") and name != "torch"
        assert found[name]["error"].startswith(step if is_step_first else moments), name
