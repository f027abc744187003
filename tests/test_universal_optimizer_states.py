"""universal_optimizer_states: what goes wrong on the real DeepSpeed, on 2 and 3 ranks, and what the fix makes right."""

from upstream import demonstrate, releases, with_fix, without_fix

FIX = "universal_optimizer_states"

AFFECTED = releases("deepspeed", oldest="0.14.1")


@without_fix(FIX, AFFECTED)
def test_upstream_has_the_bug(version: str, delivery: str) -> None:
    assert demonstrate(FIX, delivery, version).bug


@with_fix(FIX, AFFECTED)
def test_it_comes_out_right(version: str, delivery: str) -> None:
    assert not demonstrate(FIX, delivery, version).bug
