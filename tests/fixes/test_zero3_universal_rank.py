"""zero3_universal_rank: a universal load at ZeRO-3 on two nodes gives each rank its own shard."""

from pathlib import Path

from upstream import affected, shown, shown_on, with_fix, without_fix
from zero3_resumes import resumed, uninterrupted

RELEASES = shown_on("zero3_universal_rank")[-1:]


@without_fix(RELEASES)
def test_each_node_has_the_shards_of_the_first(version: str, delivery: str) -> None:
    assert "states differ after the load" in shown(__file__, version, delivery)


@with_fix(RELEASES)
def test_a_resume_goes_on_bit_for_bit(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# Further cases

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


# What the ranks run


def bug(folder: Path) -> str:
    """One rank on each node."""
    from trainers import deepspeed_training as dt

    return dt.resumed("stage3-1", folder, node=1, universal=True)
