"""precision_aware_reload: a run continues from the weights that were loaded into it."""

import pytest

from explore.judged import RIGHT, Stack, outcome
from explore.spaces import plainer
from test_explore import SMALL
from upstream import newest_affected

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
