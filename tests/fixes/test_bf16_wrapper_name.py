"""bf16_wrapper_name: the optimizer of the real DeepSpeed in bf16 with fp32 gradient accumulation."""

import functools
from typing import Any

from upstream import affected, with_fix, without_fix
from zero_resumes import exact, optimizers, resumed, trained

FIX = "bf16_wrapper_name"

AFFECTED = affected(FIX)
CASES = ("bf16_optimizer-2", "stage0_fp32_gradients-2", "pipeline-2")
NO_FILES = "AttributeError: 'FP16_UnfusedOptimizer' object has no attribute 'dp_process_group'"


@functools.cache
def found(version: str, delivery: str) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """The optimizers of trainings, and the results of resumes from their checkpoints."""
    folder = trained(version, delivery, *CASES)
    results = resumed(version, delivery, *(folder / case for case in CASES))
    return optimizers(folder), dict(zip(CASES, results, strict=True))


@without_fix(AFFECTED)
def test_upstream_runs_without_zero_and_nothing_can_be_resumed(version: str, delivery: str) -> None:
    chosen, results = found(version, delivery)
    assert chosen == dict.fromkeys(CASES, "FP16_UnfusedOptimizer")
    assert list((trained(version, delivery, *CASES) / CASES[0] / "global_step2").glob("*optim_states*")) == []
    assert results[CASES[0]]["error"] == NO_FILES
    assert not any(map(exact, results.values()))


@with_fix(AFFECTED)
def test_the_optimizer_that_was_asked_for_resumes_as_if_it_had_not_stopped(version: str, delivery: str) -> None:
    """Resumes are exact, without ZeRO too, due to `bf16_stage0_state`."""
    chosen, results = found(version, delivery)
    assert chosen == dict.fromkeys(CASES, "BF16_Optimizer")
    assert {case: exact(result) for case, result in results.items()} == dict.fromkeys(CASES, True), results
