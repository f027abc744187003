"""Costs that grow with ranks, layers and bytes grow no faster with the fixes: docs/scale.md."""

from pathlib import Path

import pytest

import growth
from growth import Size

pytestmark = pytest.mark.long

SMALL, LARGE = Size(ranks=2, layers=2, hidden=32, chunks=16), Size(ranks=4, layers=4, hidden=64, chunks=80)
RUNS = [
    growth.MEGATRON,
    pytest.param(growth.ZARR, marks=pytest.mark.slow),
    pytest.param(growth.FLATTENED, marks=pytest.mark.slow),
    pytest.param(growth.ZERO, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: " ".join(run.release))
def test_nothing_grows_faster_than_upstreams(run: growth.Run, tmp_path: Path) -> None:
    """With all fixes, messages, bytes, files, metadata operations and written bytes grow no faster."""
    small, large = (
        {side: growth.counted(run, size, side, tmp_path / str(size.ranks)) for side in growth.DELIVERIES}
        for size in (SMALL, LARGE)
    )
    assert large["ours"].keys() == large["upstream"].keys()
    found = {
        part: growth.faster(*({side: run[side][part] for side in run} for run in (small, large)))
        for part in large["ours"]
    }
    assert {part: words for part, words in found.items() if words} == {}


def test_no_rank_makes_the_chunk_files_of_others(tmp_path: Path) -> None:
    """Ranks 2 and 3 create the second chunk of each of 20 arrays: they share that tensor-parallel rank."""
    ours = growth.counted(growth.ZARR, Size(ranks=4, chunks=40), "ours", tmp_path)["save"]
    assert sum(rank["created"] for rank in ours[2:]) >= 20


def side(ranks: int, count: int, **more: int) -> list[dict[str, int]]:
    return [{**dict.fromkeys(growth.MEASURES, count), **more} for _ in range(ranks)]


@pytest.mark.parametrize("name", growth.MEASURES)
def test_growth_that_upstream_does_not_have_is_found(name: str) -> None:
    small = {"ours": side(2, 10), "upstream": side(2, 10)}
    large = {"ours": side(2, 10_000, **{name: 20_000}), "upstream": side(2, 10_000)}
    assert [found.partition(" of ")[0] for found in growth.faster(small, large)] == [name, name]
    assert growth.faster(small, {"ours": side(2, 10_000), "upstream": side(2, 10_000)}) == []
    assert growth.faster(small, {"ours": side(2, 10), "upstream": side(2, 10_000)}) == []
