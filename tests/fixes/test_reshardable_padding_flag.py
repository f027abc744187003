"""reshardable_padding_flag: the precision-aware optimizer loads a dp-reshardable state."""

from functools import partial
from pathlib import Path

from trainers.lazy import mt
from upstream import affected, shown, with_fix, without_fix

RELEASES = affected("reshardable_padding_flag")


@without_fix(RELEASES)
def test_the_load_takes_a_flag_for_a_state(version: str, delivery: str) -> None:
    found = shown(__file__, version, delivery)
    assert found.startswith(("AttributeError: 'bool'", "KeyError: 'padding'"))


@with_fix(RELEASES)
def test_a_resume_of_it_goes_on_bit_for_bit(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# What the ranks run


def bug(folder: Path) -> str:
    precision_aware = partial(mt.build, precision_aware=True)
    return mt.resumed("dp_reshardable", precision_aware, folder / "checkpoint", steps=2)
