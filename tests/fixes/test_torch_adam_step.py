"""torch_adam_step: the real megatron-core without Apex and Transformer Engine resumes with torch's AdamW."""

from pathlib import Path

from test_dp_zero_empty_state import save_and_resume
from upstream import affected, checkpoint_formats, with_fix, without_fix

FIX = "torch_adam_step"
AFFECTED = affected(FIX)
THREE_STEPS = ("--inner", "torch", "--steps", "3")


@without_fix(AFFECTED)
def test_upstream_does_not_resume_torchs_adam(version: str, delivery: str, tmp_path: Path) -> None:
    found = save_and_resume(version, delivery, tmp_path, *THREE_STEPS, only=("torch",))["torch"]
    assert found["error"] == "load: KeyError: 'step'" or found["resume"] == "differs"


@with_fix(AFFECTED)
def test_a_resume_is_bit_equal_in_every_format(version: str, delivery: str, tmp_path: Path) -> None:
    found = save_and_resume(version, delivery, tmp_path, *THREE_STEPS)
    assert {name: (line["error"], line["resume"]) for name, line in found.items()} == dict.fromkeys(
        checkpoint_formats(version), ("", "bit-equal")
    )


def test_the_dp_reshardable_format_of_0_15_leaves_the_step_out_too(tmp_path: Path) -> None:
    """With the fix, 0.15 omits the step, like the bucket-space format before it. 0.16 omits it without the fix."""
    died = save_and_resume("0.15.3", "none", tmp_path / "none", *THREE_STEPS, only=("dp_reshardable",))
    assert died["dp_reshardable"]["error"].startswith("save: AssertionError")
    found = save_and_resume("0.15.3", "hook", tmp_path / "hook", *THREE_STEPS, only=("dp_reshardable",))
    assert (found["dp_reshardable"]["error"], found["dp_reshardable"]["resume"]) == ("", "bit-equal")
