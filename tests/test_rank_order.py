"""rank_order: the order in which DeepSpeed's own converter joins the fragments of many ranks."""

from pathlib import Path

import pytest

from universal import both, ours
from upstream import affected, newest, with_fix, without_fix
from zero_checkpoints import convert, converted, differences, of_ranks

FIX = "rank_order"

AFFECTED = affected(FIX)
OLD = "0.12.6"

# Above 10 ranks, file names sort differently than ranks; above 100, fragments do.
COUNTS = (11, 101)


@without_fix(AFFECTED)
@pytest.mark.parametrize("count", COUNTS)
def test_upstream_joins_the_right_elements_in_the_wrong_order(
    version: str, delivery: str, count: int, tmp_path: Path
) -> None:
    """Upstream silently joins the right elements in the wrong order: no size is wrong, no element lost."""
    source = of_ranks(count)
    assert convert(tmp_path, source, version=version, delivery=delivery) == {str(count): ""}
    found = converted(tmp_path / str(count))
    wrong = {name.partition(".")[0] for name in differences(found, source)}
    assert wrong == ({"scale"} if count == 11 else {"weight", "scale"})  # of 11 ranks only the last is misplaced
    assert differences(found, source, in_order=False) == []


def test_upstream_is_right_on_10_ranks(tmp_path: Path) -> None:
    assert convert(tmp_path, of_ranks(10), version=OLD, delivery="none") == {"10": ""}
    assert differences(converted(tmp_path / "10"), of_ranks(10)) == []


@with_fix(AFFECTED)
def test_joins_them_in_the_order_of_the_ranks(version: str, delivery: str, tmp_path: Path) -> None:
    """The result is bit-equal to the saved state, also with few ranks."""
    counts = (10, *COUNTS)
    outcome = convert(tmp_path, *map(of_ranks, counts), version=version, delivery=delivery)
    assert outcome == {str(count): "" for count in counts}
    for count in counts:
        assert differences(converted(tmp_path / str(count)), of_ranks(count)) == []


@pytest.mark.parametrize("version", [OLD, newest("deepspeed")])
def test_the_one_pass_converter_has_that_order(version: str, tmp_path: Path) -> None:
    """The one-pass converter joins in rank order, even where the release's own does not."""
    for count in COUNTS:
        ours(of_ranks(count), tmp_path / str(count), version=version)
        assert differences(converted(tmp_path / str(count)), of_ranks(count)) == []


def test_the_one_pass_converter_writes_what_upstreams_writes(tmp_path: Path) -> None:
    assert both(tmp_path, *map(of_ranks, COUNTS), version=OLD) == {str(count): [] for count in COUNTS}
