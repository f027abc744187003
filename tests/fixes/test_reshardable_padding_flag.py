"""reshardable_padding_flag: the precision-aware optimizer loads a dp-reshardable state."""

import re
from functools import partial
from pathlib import Path

from trainers.lazy import mt
from upstream import proof

test_the_load_takes_a_flag_for_a_state, test_a_resume_of_it_goes_on_bit_for_bit = proof(
    __file__, re.compile("^(AttributeError: 'bool'|KeyError: 'padding')")
)


# What the ranks run


def bug(folder: Path) -> str:
    precision_aware = partial(mt.build, precision_aware=True)
    return mt.resumed("dp_reshardable", precision_aware, folder / "checkpoint", steps=2)
