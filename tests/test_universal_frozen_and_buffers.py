"""universal_frozen_and_buffers: tensors that are not optimized, after universal loads of the real DeepSpeed.

At stages 1, 2 and 3, saved on 2 ranks and loaded on 3, and the reverse.
"""

import pytest

from upstream import affected, demonstrate, with_fix, without_fix

pytestmark = pytest.mark.long

FIX = "universal_frozen_and_buffers"

AFFECTED = affected(FIX)


@without_fix(AFFECTED)
def test_upstream_keeps_the_values_of_the_new_run(version: str, delivery: str) -> None:
    shown = demonstrate(FIX, delivery, version)
    assert shown.found == "seen, w1.bias, w1.weight are not those saved, and no error"


@with_fix(AFFECTED)
def test_they_are_those_saved(version: str, delivery: str) -> None:
    assert not demonstrate(FIX, delivery, version).bug
