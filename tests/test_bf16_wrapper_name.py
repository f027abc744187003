"""bf16_wrapper_name: which optimizer the real DeepSpeed runs in bf16 with fp32 gradient accumulation."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edits
from ckpt_patches.engine.plan import Outcome
from upstream import DELIVERIES, numbers, releases, tree
from zero_resumes import exact, optimizers, resumed, trained

FIX = "bf16_wrapper_name"

AFFECTED = releases("deepspeed", oldest="0.17.6", newest="0.18.4") or ["0.18.4"]  # none of the default run
STAGE1, STAGE0, PIPELINE = CASES = ("bf16_optimizer-2", "stage0_fp32_gradients-2", "pipeline-2")
NO_FILES = "AttributeError: 'FP16_UnfusedOptimizer' object has no attribute 'dp_process_group'"


@functools.cache
def found(version: str, delivery: str) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """The optimizers of trainings, and what comes of resumes from what they have saved."""
    folder = trained(version, delivery, *CASES)
    results = resumed(version, delivery, *(folder / case for case in CASES))
    return optimizers(folder), dict(zip(CASES, results, strict=True))


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", ["none"])
@pytest.mark.parametrize("version", AFFECTED)
def test_upstream_runs_without_zero_and_nothing_can_be_resumed(version: str, delivery: str) -> None:
    chosen, results = found(version, delivery)
    assert chosen == dict.fromkeys(CASES, "FP16_UnfusedOptimizer")
    assert list((trained(version, delivery, *CASES) / STAGE1 / "global_step2").glob("*optim_states*")) == []
    assert results[STAGE1]["error"] == NO_FILES
    assert not any(map(exact, results.values()))


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", AFFECTED)
def test_the_optimizer_that_was_asked_for_resumes_as_if_it_had_not_stopped(version: str, delivery: str) -> None:
    """Without ZeRO as well, by `bf16_stage0_state`."""
    chosen, results = found(version, delivery)
    assert chosen == dict.fromkeys(CASES, "BF16_Optimizer")
    assert {case: exact(result) for case, result in results.items()} == dict.fromkeys(CASES, True), results


# The edits themselves

CONSTANTS = "deepspeed.runtime.constants"
BF16_OPTIMIZER = "deepspeed.runtime.bf16_optimizer"
BASE = "deepspeed.runtime.base_optimizer"
ADDED = {
    "constants": ['DDP_BFLOAT16 = "ddp_bf16"'],
    "bf16_optimizer": [
        "# Read by the scaling of losses, which bf16 does without.",
        "self.custom_loss_scaler = False",
        "self.external_loss_scale = None",
        "self.torch_autocast_gradscaler = None",
    ],
    "base_optimizer": ["return self.loss_scaler.scale_loss(value) if hasattr(self, 'loss_scaler') else value"],
}


@pytest.mark.parametrize("version", AFFECTED)
def test_what_is_added(version: str) -> None:
    result, plan = edits.plan(tree("deepspeed", version), FIX)
    assert result.outcome is Outcome.APPLIES
    added = ADDED if numbers(version) >= (0, 18, 3) else {"constants": ADDED["constants"]}
    assert edits.added_lines(plan) == added


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", releases("deepspeed", oldest="0.18.5"))
def test_fixed_upstream(version: str, delivery: str, record_property: Callable[[str, object], None]) -> None:
    edits.check_fixed_upstream(version, FIX, record_property)


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", releases("deepspeed", newest="0.17.5"))
def test_releases_with_one_such_name_are_not_concerned(
    version: str, delivery: str, record_property: Callable[[str, object], None]
) -> None:
    edits.check_not_present(version, FIX, record_property)


def test_the_order_of_the_fixes_of_these_files_does_not_matter(tmp_path: Path) -> None:
    edits.check_in_any_order(
        tree("deepspeed", "0.18.4"), ["universal_empty_group", "optimizer_state_links", FIX], tmp_path
    )


@pytest.fixture(params=["0.18.4"])
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return edits.copy_of(tree("deepspeed", request.param), FIX, tmp_path)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (CONSTANTS, 'DDP_BFLOAT16 = "bf16"', 'DDP_BFLOAT16 = BFLOAT16 + ""'),
        (
            BF16_OPTIMIZER,
            "self.grad_acc_dtype = grad_acc_dtype",
            "self.grad_acc_dtype = grad_acc_dtype or torch.float32",
        ),
        (BASE, "return self.loss_scaler.scale_loss(value)", "return self.loss_scaler.scale(value)"),
    ],
)
def test_unknown_code_is_left_alone(copy: Path, module: str, old: str, new: str) -> None:
    reason = edits.check_left_alone(copy, FIX, module, old, new)
    assert f"{module.rpartition('.')[2]}.py: expected" in reason
