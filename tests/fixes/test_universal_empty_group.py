"""universal_empty_group: the real DeepSpeed loads a param group of one element on two ranks."""

import re
from pathlib import Path

from trainers.lazy import dt
from upstream import affected, numbers, proof

# Between these, at stages 1 and 2 a training step fails (`tensor_list[0]`) if a rank has nothing of a group.
TRAIN_NO_SMALL_GROUP = ("0.17.6", "0.18.2")


def trains(version: str) -> bool:
    first, last = map(numbers, TRAIN_NO_SMALL_GROUP)
    return not first <= numbers(version) <= last


RELEASES = [one for one in affected("universal_empty_group") if trains(one.values[0])]
test_the_load_fails, test_a_resume_goes_on_bit_for_bit = proof(
    __file__, re.compile("^IndexError: list index out of range$"), RELEASES
)


# What the ranks run


def bug(folder: Path) -> str:
    dt.allow_pickles()
    found = {case: dt.resumed(case, folder / case, universal=True) for case in ("stage1-3", "stage2-3")}
    return "; ".join(f"{case}: {wrong}" for case, wrong in found.items() if wrong)
