"""reshardable_padding_flag: the precision-aware optimizer loads a dp-reshardable state."""

from functools import partial
from pathlib import Path

import edits
from test_dp_zero_empty_state import save_and_resume
from upstream import numbers, releases, shown, shown_on, tree, with_fix, without_fix

RELEASES = shown_on("reshardable_padding_flag")[-1:]


@without_fix(RELEASES)
def test_the_load_takes_a_flag_for_a_state(version: str, delivery: str) -> None:
    found = shown(__file__, version, delivery)
    assert found.startswith(("AttributeError: 'bool'", "KeyError: 'padding'"))


@with_fix(RELEASES)
def test_a_resume_of_it_goes_on_bit_for_bit(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# Further cases

FIX = "reshardable_padding_flag"
AFFECTED = releases("megatron-core")
NEWEST = "0.16.1"
TWO_STEPS = ("--precision-aware", "--steps", "2")


def reshardable(version: str) -> str:
    """The name of the format in a release."""
    return "dp_reshardable" if numbers(version) >= (0, 15) else "fully_sharded_bucket_space"


def leaves_the_flag_out(version: str) -> bool:
    """Whether the load skips non-tensors, such as the flag: since Megatron-LM#3537 (23dd639cf3, 2026-02-23)."""
    return numbers(version) >= (0, 17)


@without_fix(AFFECTED)
def test_upstream_takes_the_flag_for_a_state(version: str, delivery: str, tmp_path: Path) -> None:
    name = reshardable(version)
    found = save_and_resume(version, delivery, tmp_path, *TWO_STEPS, only=(name,))[name]
    if leaves_the_flag_out(version):
        assert (found["error"], found["resume"]) == ("", "bit-equal")
    else:
        assert found["error"] == "load: AttributeError: 'bool' object has no attribute 'dtype'"


@with_fix(AFFECTED)
def test_a_resume_is_bit_equal(version: str, delivery: str, tmp_path: Path) -> None:
    name = reshardable(version)
    found = save_and_resume(version, delivery, tmp_path, *TWO_STEPS, only=(name,))[name]
    assert (found["error"], found["resume"]) == ("", "bit-equal")
    if leaves_the_flag_out(version):
        edits.check_not_needed(tree("megatron-core", version), FIX)


# What the ranks run


def bug(folder: Path) -> str:
    from trainers import megatron_training as mt

    precision_aware = partial(mt.build, precision_aware=True)
    return mt.resumed("dp_reshardable", precision_aware, folder / "checkpoint", steps=2)
