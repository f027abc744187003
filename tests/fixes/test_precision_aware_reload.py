"""precision_aware_reload: weights that are loaded into a run with the precision-aware optimizer stay."""

from pathlib import Path

import pytest

from explore.judged import RIGHT, Stack, outcome
from explore.spaces import plainer
from explore.test_explore import SMALL
from trainers.lazy import mt
from upstream import newest_affected, proof

test_the_next_step_undoes_the_load, test_the_next_step_starts_from_the_loaded_weights = proof(
    __file__, "weights are those from before the load, and no error"
)


# Further cases

FIX = "precision_aware_reload"


@pytest.mark.parametrize("kind", ["fully_reshardable", "dp_zero_gather_scatter"])
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_are_loaded_into_a_run_stay(kind: str, frozen: bool) -> None:
    """Loaded weights stay through the next steps of a real model. Without the fix, old main parameters replace them."""
    _, version = newest_affected(FIX)
    run = {"precision_aware": True, "format": kind, "frozen": frozen}
    load = {"restore": "weights", "trained": True}
    case = plainer(SMALL["megatron"], [{"run": run, "load": load}])
    with_all, without = (outcome(case, Stack("megatron", version, without=name)) for name in ("", FIX))
    assert with_all.kind == RIGHT, with_all
    assert str(without) == f"SILENT {kind}, weights: fp32"


# What the ranks run


def load_and_step(rank: int, folder: Path) -> str:
    mt.use_inner_optimizer("fused")
    model, optimizer = mt.build(precision_aware=True)
    mt.step(model, optimizer, 0)
    lost = len(mt.weights_lost(model, optimizer))
    return f"{lost} of 4 weights are those from before the load, and no error" if lost else ""


def bug(folder: Path) -> str:
    return str(mt.results(load_and_step, 2, folder / "checkpoint")[0])
