"""decoupled_last_save: what goes wrong on the real DeepSpeed, and what comes out with the fix."""

from upstream import demonstrate, releases, with_fix, without_fix

FIX = "decoupled_last_save"

# Between them the decoupled writer does not start.
AFFECTED = [*releases("deepspeed", oldest="0.17.1", newest="0.17.1"), *releases("deepspeed", oldest="0.18.4")]


@without_fix(FIX, AFFECTED)
def test_upstream_has_the_bug(version: str, delivery: str) -> None:
    assert demonstrate(FIX, delivery, version).bug


@with_fix(FIX, AFFECTED)
def test_it_comes_out_right(version: str, delivery: str) -> None:
    assert not demonstrate(FIX, delivery, version).bug
