"""zero3_universal_rank: what ranks of several nodes hold after a ZeRO-3 resume from a universal checkpoint."""

from collections.abc import Callable
from pathlib import Path

import pytest

import edits
from upstream import DELIVERIES, releases, tree
from zero3_resumes import resumed, uninterrupted

FIX = "zero3_universal_rank"
STAGE3 = "deepspeed.runtime.zero.stage3"

AFFECTED = releases("deepspeed", oldest="0.14.5", newest="0.17.6")
RUN = ("stage3", 4)  # of 4 ranks; at other stages the rank is asked for elsewhere
TWO_NODES = ("--node", "2")


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", ["none"])
@pytest.mark.parametrize("version", AFFECTED)
def test_upstream_gives_each_node_what_the_first_has(version: str, delivery: str) -> None:
    """Without a word: rank 2, the first of the second node, takes the part of rank 0."""
    found, expected = resumed(version, *RUN, delivery, *TWO_NODES), uninterrupted(version, *RUN)
    assert len(found["different"]) == 15  # of 21: those of a single element are on rank 0 alone
    assert found["losses"] != expected["losses"]
    assert resumed(version, *RUN, delivery) == expected  # one node


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", AFFECTED)
def test_resumes_on_two_nodes_as_if_it_had_not_stopped(version: str, delivery: str) -> None:
    """Every bit after the load, the next losses, and every bit after them."""
    assert resumed(version, *RUN, delivery, *TWO_NODES) == uninterrupted(version, *RUN)


def test_resumes_with_one_rank_on_each_node() -> None:
    assert resumed("0.16.2", *RUN, "hook", "--node", "1") == uninterrupted("0.16.2", *RUN)


# The edit itself

ADDED = [
    "rank = dist.get_rank(group=self.dp_process_group)",
    "checkpoint_state_partition = loaded_checkpoint_state.narrow(0, rank * partitioned_numel, partitioned_numel)",
]


@pytest.mark.parametrize("version", AFFECTED)
def test_what_is_added(version: str) -> None:
    edits.check_added(version, FIX, {"stage3": ADDED})


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", releases("deepspeed", oldest="0.18.0"))
def test_fixed_upstream(version: str, delivery: str, record_property: Callable[[str, object], None]) -> None:
    edits.check_fixed_upstream(version, FIX, record_property)


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", releases("deepspeed", newest="0.14.4"))
def test_releases_without_such_a_load_are_not_concerned(
    version: str, delivery: str, record_property: Callable[[str, object], None]
) -> None:
    edits.check_not_present(version, FIX, record_property)


@pytest.fixture(params=AFFECTED)
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return edits.copy_of(tree("deepspeed", request.param), FIX, tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("local_rank = dist.get_local_rank()\n\n", "local_rank = int(os.environ['LOCAL_RANK'])\n\n"),
        ("local_rank = dist.get_local_rank()\n\n", "local_rank, size = dist.get_local_rank(), 1\n\n"),
        ("narrow(0, local_rank * partitioned_numel,", "narrow(0, (local_rank) * (partitioned_numel + 0),"),
        ("class DeepSpeedZeroOptimizer_Stage3(", "class ZeroOptimizerStage3("),
    ],
)
def test_unknown_code_is_left_alone(copy: Path, old: str, new: str) -> None:
    reason = edits.check_left_alone(copy, FIX, STAGE3, old, new)
    assert "stage3.py: expected" in reason


@pytest.mark.parametrize("other", ["torch_load_weights_only"])
def test_with_another_fix_of_the_same_load_the_order_does_not_matter(other: str, tmp_path: Path) -> None:
    edits.check_in_any_order(tree("deepspeed", "0.15.4"), (FIX, other), tmp_path)
