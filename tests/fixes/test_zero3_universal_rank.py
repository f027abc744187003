"""zero3_universal_rank: a universal load at ZeRO-3 on several nodes gives each rank its own shard."""

from pathlib import Path

from trainers.lazy import dt
from upstream import affected, shown, with_fix, without_fix

RELEASES = affected("zero3_universal_rank")


@without_fix(RELEASES)
def test_each_node_has_the_shards_of_the_first(version: str, delivery: str) -> None:
    found = shown(__file__, version, delivery)
    assert "1 rank on each node: " in found
    assert "2 ranks on each node: " in found
    assert found.count("states differ after the load") == 2


@with_fix(RELEASES)
def test_a_resume_goes_on_bit_for_bit(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# What the ranks run

NODES = {"1 rank on each node": (2, 1), "2 ranks on each node": (4, 2), "one node": (4, 4)}


def bug(folder: Path) -> str:
    dt.allow_pickles()
    found = {
        nodes: dt.resumed("stage3-1", folder / nodes, ranks=ranks, node=node, universal=True)
        for nodes, (ranks, node) in NODES.items()
    }
    return "; ".join(f"{nodes}: {wrong}" for nodes, wrong in found.items() if wrong)
