"""bf16_stage0_state: the optimizer state in bf16 without ZeRO is saved and loaded."""

import functools
from pathlib import Path
from typing import Any

import pytest

from trainers.lazy import dt
from upstream import affected, newest_by_default, numbers, proof, releases, with_fix, without_fix
from zero_resumes import exact, optimizers, resumed, trained

test_a_pipeline_of_the_newest_release_does_not_load, test_a_pipeline_of_the_newest_release_resumes = proof(
    __file__, "KeyError: ", affected("bf16_stage0_state")[-1:]
)


# Further cases

FIX = "bf16_stage0_state"

# All releases of the default run save the state.
STATELESS = releases("deepspeed", oldest="0.17.6", newest="0.18.4") or ["0.18.4"]
LATER = releases("deepspeed", oldest="0.18.5")
AFFECTED = [*STATELESS, *newest_by_default(LATER)]
CASE, PIPELINE = "stage0-2", "pipeline-2"
UNFUSED, BF16 = "FP16_UnfusedOptimizer", "BF16_Optimizer"


def saves_state(version: str) -> bool:
    return numbers(version) >= (0, 18, 5)


@functools.cache
def resumes_without(version: str) -> dict[str, dict[str, Any]]:
    """Results of resumes from checkpoints of the unpatched release; "old" has no optimizer state."""
    folder = trained(version, "none", CASE, PIPELINE)
    assert optimizers(folder) == {CASE: UNFUSED, PIPELINE: BF16 if saves_state(version) else UNFUSED}
    return dict(zip(("own", "pipeline", "old"), resumed(version, "none", *saved_without_fix(version)), strict=True))


def saved_without_fix(version: str) -> tuple[Path, ...]:
    own = trained(version, "none", CASE, PIPELINE)
    return own / CASE, own / PIPELINE, trained("0.18.4", "none", CASE, PIPELINE) / CASE


@functools.cache
def resumes_with(version: str, delivery: str) -> dict[str, dict[str, Any]]:
    """Results of resumes from checkpoints saved with the fix and without it."""
    folder = trained(version, delivery, CASE, PIPELINE)
    assert optimizers(folder)[CASE] == UNFUSED
    own, pipeline, old = saved_without_fix(version)
    folders = [folder / CASE, folder / PIPELINE, pipeline if saves_state(version) else own, old]
    names = ("own", "pipeline", "saved without", "old")
    return dict(zip(names, resumed(version, delivery, *folders), strict=True))


@without_fix(STATELESS)
def test_upstream_saves_no_state_and_the_first_step_undoes_the_load(version: str, delivery: str) -> None:
    found = resumes_without(version)["own"]
    if numbers(version) == (0, 17, 6):
        assert found["error"] == "AttributeError: 'FP16_UnfusedOptimizer' object has no attribute 'dp_process_group'"
        return
    states = {name.rpartition(".")[2] for name in found["different"]}
    assert states == {"fp32", "exp_avg", "exp_avg_sq", "steps", "cur_iter", "lr"}
    assert len(found["different"]) == 7 * 3 + 4
    assert found["losses"][0] == found["expected"][0]  # the weights are right
    assert found["losses"][1] > found["expected"][1] + 0.5


@without_fix(newest_by_default(LATER))
def test_upstream_dies_where_bf16_optimizer_runs_without_zero(version: str, delivery: str) -> None:
    """Upstream's BF16_Optimizer without ZeRO fails to load a pipeline's checkpoint and one without the state."""
    found = resumes_without(version)
    assert found["pipeline"]["error"] in ("KeyError: 0", "KeyError: 1")  # the rank
    assert found["old"]["error"] == "TypeError: 'NoneType' object is not subscriptable"
    assert found["own"]["different"] == []
    # In 0.18.5 the uninterrupted run adds the gradients of all earlier steps to each step.
    assert exact(found["own"]) == (version != "0.18.5")


@with_fix(AFFECTED)
def test_resumes_as_if_it_had_not_stopped(version: str, delivery: str) -> None:
    """Weights, main parameters, moments, steps, settings and counters are bit-equal after the load and two steps."""
    found = resumes_with(version, delivery)
    assert (exact(found["own"]), exact(found["pipeline"])) == (True, True), found
    if saves_state(version):  # with pipeline parallelism upstream saved all of it too
        assert exact(found["saved without"])


@with_fix(AFFECTED)
def test_a_checkpoint_without_the_state_is_refused(version: str, delivery: str) -> None:
    """The error names the missing state, and the option to load the rest."""
    found = resumes_with(version, delivery)
    for one in [found["old"]] if saves_state(version) else [found["old"], found["saved without"]]:
        assert one["error"].startswith("RuntimeError: expected the optimizer's state in ")
        assert "found none, as DeepSpeed 0.17.6 to 0.18.4 saved it in bf16 without ZeRO" in one["error"]
        assert "load_optimizer_states=False" in one["error"]


@with_fix(AFFECTED)
def test_it_keeps_its_weights_where_no_state_is_asked_for(version: str, delivery: str) -> None:
    """The step after a load without states starts from the loaded weights, with new moments."""
    _, _, old = saved_without_fix(version)
    (one,) = resumed(version, delivery, old, states=False)
    assert one["masters are weights"]
    assert [name for name in one["different"] if name.endswith(".weight")] == []
    assert one["losses"][0] == pytest.approx(one["expected"][0], abs=1e-6)
    assert one["losses"][1] == pytest.approx(one["expected"][1], abs=0.1)


# What the ranks run


def bug(folder: Path) -> str:
    return dt.resumed("pipeline-2", folder)
