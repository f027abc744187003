"""zero3_module_only: what goes wrong on the real DeepSpeed, on 2 and 3 ranks, and what comes out with the fix."""

from upstream import demonstrate, releases, with_fix, without_fix

FIX = "zero3_module_only"

AFFECTED = releases("deepspeed", oldest="0.13.0")


@without_fix(FIX, AFFECTED)
def test_upstream_has_the_bug(version: str, delivery: str) -> None:
    assert demonstrate(FIX, delivery, version).bug


@with_fix(FIX, AFFECTED)
def test_it_comes_out_right(version: str, delivery: str) -> None:
    assert not demonstrate(FIX, delivery, version).bug
