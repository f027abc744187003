"""torch_adam_step: the real megatron-core without Apex and Transformer Engine resumes with torch's AdamW."""

from pathlib import Path
from typing import Any

from test_dp_zero_empty_state import exact, resumed
from upstream import affected, with_fix, without_fix

AFFECTED = affected("torch_adam_step")
THREE_STEPS: dict[str, Any] = {"inner": "torch", "steps": 3}


@without_fix(AFFECTED)
def test_upstream_does_not_resume_torchs_adam(version: str, delivery: str, tmp_path: Path) -> None:
    found = resumed(version, delivery, tmp_path, "torch", **THREE_STEPS)["torch"]
    assert found == "KeyError: 'step'" or "states differ, and no error" in found


@with_fix(AFFECTED)
def test_a_resume_is_bit_equal_in_every_format(version: str, delivery: str, tmp_path: Path) -> None:
    assert resumed(version, delivery, tmp_path, **THREE_STEPS) == exact(version)


def test_the_dp_reshardable_format_of_0_15_leaves_the_step_out_too(tmp_path: Path) -> None:
    """With the fix, 0.15 omits the step, like the bucket-space format before it. 0.16 omits it without the fix."""
    failed = resumed("0.15.3", "none", tmp_path / "none", "dp_reshardable", **THREE_STEPS)["dp_reshardable"]
    assert failed.startswith("AssertionError")
    assert resumed("0.15.3", "hook", tmp_path / "hook", "dp_reshardable", **THREE_STEPS) == {"dp_reshardable": ""}
