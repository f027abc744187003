"""zero_to_fp32_bf16: the bug on the real DeepSpeed, and the right result with the fix."""

import pytest

from upstream import affected, demonstrate, releases, with_fix, without_fix

pytestmark = pytest.mark.long

FIX = "zero_to_fp32_bf16"

AFFECTED = affected(FIX)
# In the releases between, such a run has no ZeRO, unless `bf16_wrapper_name` is active.
SHOWN_ALONE = [*releases("deepspeed", newest="0.17.5"), *releases("deepspeed", oldest="0.18.5")]


@without_fix(SHOWN_ALONE)
def test_upstream_has_the_bug(version: str, delivery: str) -> None:
    assert demonstrate(FIX, delivery, version).bug


@with_fix(AFFECTED)
def test_it_comes_out_right(version: str, delivery: str) -> None:
    assert not demonstrate(FIX, delivery, version).bug
