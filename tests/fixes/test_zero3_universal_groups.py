"""zero3_universal_groups: each group of a ZeRO-3 run has its settings and steps after a universal load."""

import re
from pathlib import Path

from trainers.lazy import dt
from upstream import affected, newest_by_default, proof

test_groups_have_the_first_ones_settings_and_steps_of_all, test_a_resume_goes_on_bit_for_bit = proof(
    __file__,
    # Two settings of the second; the loaded state of the one group is right, and its steps count several times.
    re.compile("two groups: 2 of .*one group in parts: 0 of "),
    newest_by_default(affected("zero3_universal_groups")),
)


# What the ranks run

CASES = {"two groups": "stage3_groups-2", "one group in parts": "stage3_sub_groups-1"}


def bug(folder: Path) -> str:
    found = {name: dt.resumed(case, folder / case, universal=True) for name, case in CASES.items()}
    return "; ".join(f"{name}: {wrong}" for name, wrong in found.items() if wrong)
