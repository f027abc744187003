"""muon_momentum_dtype: what a resume of Muon at ZeRO 1 and 2 does on the real DeepSpeed."""

from upstream import demonstrate, releases, with_fix, without_fix

FIX = "muon_momentum_dtype"

AFFECTED = releases("deepspeed", oldest="0.18.3", newest="0.19.6")


@without_fix(FIX, AFFECTED)
def test_upstream_fails_in_the_first_step_after_the_load(version: str, delivery: str) -> None:
    found = demonstrate(FIX, delivery, version)
    assert found.bug
    assert found.found == "RuntimeError: expected dtype float for `end` but got dtype c10::BFloat16"


@with_fix(FIX, AFFECTED)
def test_it_goes_on_bit_for_bit(version: str, delivery: str) -> None:
    """Weights, masters, momentum, moments and settings after the load and two steps later, and the losses."""
    found = demonstrate(FIX, delivery, version)
    assert not found.bug, found.found
