"""zero3_universal_rank: the shards on ranks of several nodes after a ZeRO-3 resume from a universal checkpoint."""

from upstream import affected, with_fix, without_fix
from zero3_resumes import resumed, uninterrupted

FIX = "zero3_universal_rank"

AFFECTED = affected(FIX)
RUN = ("stage3", 4)  # ranks; at other stages the rank is determined elsewhere
TWO_NODES = ("--node", "2")


@without_fix(AFFECTED)
def test_upstream_gives_each_node_what_the_first_has(version: str, delivery: str) -> None:
    """Silently, rank 2, the first of the second node, loads the shard of rank 0."""
    found, expected = resumed(version, *RUN, delivery, *TWO_NODES), uninterrupted(version, *RUN)
    assert len(found["different"]) == 15  # of 21: tensors of one element are on rank 0 only
    assert found["losses"] != expected["losses"]
    assert resumed(version, *RUN, delivery) == expected  # one node


@with_fix(AFFECTED)
def test_resumes_on_two_nodes_as_if_it_had_not_stopped(version: str, delivery: str) -> None:
    """Tensors after the load, the next losses, and tensors after them are bit-equal."""
    assert resumed(version, *RUN, delivery, *TWO_NODES) == uninterrupted(version, *RUN)


def test_resumes_with_one_rank_on_each_node() -> None:
    assert resumed("0.16.2", *RUN, "hook", "--node", "1") == uninterrupted("0.16.2", *RUN)
