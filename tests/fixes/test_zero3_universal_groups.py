"""zero3_universal_groups: each group of a ZeRO-3 run has its settings and steps after a universal load."""

from pathlib import Path

from trainers.lazy import dt
from upstream import affected, newest_by_default, shown, with_fix, without_fix

RELEASES = newest_by_default(affected("zero3_universal_groups"))


@without_fix(RELEASES)
def test_groups_have_the_first_ones_settings_and_steps_of_all(version: str, delivery: str) -> None:
    found = shown(__file__, version, delivery)
    assert "two groups: 2 of " in found  # two settings of the second
    assert "one group in parts: 0 of " in found  # the loaded state is right, and its steps count several times


@with_fix(RELEASES)
def test_a_resume_goes_on_bit_for_bit(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# What the ranks run

CASES = {"two groups": "stage3_groups-2", "one group in parts": "stage3_sub_groups-1"}


def bug(folder: Path) -> str:
    found = {name: dt.resumed(case, folder / case, universal=True) for name, case in CASES.items()}
    return "; ".join(f"{name}: {wrong}" for name, wrong in found.items() if wrong)
