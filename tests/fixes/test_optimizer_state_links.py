"""optimizer_state_links: the moments that the real DeepSpeed's `safe_get_full_optimizer_state` finds."""

from universal_loads import written
from upstream import affected, with_fix, without_fix

FIX = "optimizer_state_links"

AFFECTED = affected(FIX)

FIRST_GROUP = {"w1.weight", "w2.weight"}
OTHER_GROUPS = {"w1.bias", "ln.weight", "ln.bias", "w2.bias", "scale"}


@without_fix(AFFECTED)
def test_upstream_finds_those_of_the_first_group_and_none_after_a_load(version: str, delivery: str) -> None:
    for kind, found in written(version, delivery).items():
        if kind == "bf16_optimizer":  # all groups step at once
            assert found["unlinked"] == {}
        else:
            assert found["unlinked"].keys() == OTHER_GROUPS
            assert set(found["unlinked"].values()) == {"ValueError: exp_avg not found in optimizer state fragment"}
        assert found["unlinked after a load"].keys() == FIRST_GROUP | OTHER_GROUPS
        assert set(found["unlinked after a load"].values()) == {
            "TypeError: argument of type 'NoneType' is not iterable"
        }
        assert found["unlinked right after a load"] == found["unlinked after a load"]


@with_fix(AFFECTED)
def test_those_of_every_group_are_found(version: str, delivery: str) -> None:
    """The moments equal the flat partitions; the run, and a load of its own files, do not change."""
    for kind, found in written(version, delivery).items():
        assert found["unlinked"] == found["unlinked right after a load"] == found["unlinked after a load"] == {}
        assert found["reloaded"] == []
        assert found["losses"] == written(version, "none")[kind]["losses"]
