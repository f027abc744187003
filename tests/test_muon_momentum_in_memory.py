"""muon_momentum_in_memory: what a resume of Muon at ZeRO-3 does on the real DeepSpeed."""

from upstream import demonstrate, releases, with_fix, without_fix

FIX = "muon_momentum_in_memory"

AFFECTED = releases("deepspeed", oldest="0.18.9")


@without_fix(FIX, AFFECTED)
def test_upstream_goes_on_with_a_momentum_of_zeros(version: str, delivery: str) -> None:
    """What is loaded is right, and is overwritten in the first step."""
    found = demonstrate(FIX, delivery, version)
    assert found.bug
    assert found.found.startswith("Muon-3: 0 of 30 states differ after the load, ")
    assert found.found.endswith("; no error")


@with_fix(FIX, AFFECTED)
def test_it_goes_on_bit_for_bit(version: str, delivery: str) -> None:
    """From its own files and from a universal checkpoint; all states after the load and two steps later, the losses."""
    found = demonstrate(FIX, delivery, version)
    assert not found.bug, found.found
