"""What grows with ranks, parameters, bytes and chunks grows no faster with the fixes than without."""

import re
from typing import Any

import pytest

import scale_page
from upstream import run_json, tree

SWEEPS = [
    (name, part, varied, sweep)
    for name, rows in scale_page.recorded().items()
    for (part, varied), sweep in scale_page.sweeps(rows).items()
]


@pytest.mark.parametrize(("name", "part", "varied", "sweep"), SWEEPS, ids=[f"{n}, {p}, {v}" for n, p, v, _ in SWEEPS])
def test_nothing_grows_faster_than_upstreams(
    name: str, part: str, varied: str, sweep: list[dict[str, scale_page.Row]]
) -> None:
    assert scale_page.faster(sweep) == []


ALONE = {
    (release, *key): sweep
    for record, sweeps_of in (
        (scale_page.OF_FIXES, scale_page.sweeps_of_fixes),
        (scale_page.OF_CASES, scale_page.sweeps_of_cases),
    )
    for release in scale_page.recorded(record)
    for key, sweep in sweeps_of(release).items()
}


@pytest.mark.parametrize(("key", "sweep"), ALONE.items(), ids=map(", ".join, ALONE))
def test_nothing_grows_faster_with_a_fix_alone(key: tuple[str, ...], sweep: list[dict[str, scale_page.Row]]) -> None:
    """Than upstream's, or than what upstream leaves out."""
    assert scale_page.faster(sweep, fix=key[1]) == []


def counted(side: int, **more: int) -> scale_page.Row:
    of_ranks = [{**dict.fromkeys(scale_page.MEASURES, side), **more} for _ in range(2)]
    return scale_page.row("a release", "save", scale_page.Size(ranks=2), "ours", of_ranks)


@pytest.mark.parametrize("name", scale_page.MEASURES)
def test_growth_that_upstream_does_not_have_is_found(name: str) -> None:
    small = {"ours": counted(10), "upstream": counted(10)}
    large = {"ours": counted(10_000, **{name: 20_000}), "upstream": counted(10_000)}
    assert [found.partition(" of ")[0] for found in scale_page.faster([small, large])] == [name, name]
    assert scale_page.faster([small, {"ours": counted(10_000), "upstream": counted(10_000)}]) == []
    assert scale_page.faster([small, {"ours": counted(10), "upstream": counted(10_000)}]) == []


def test_the_page_says_what_is_recorded() -> None:
    page = scale_page.PAGE.read_text(encoding="utf-8")
    assert scale_page.tables() in page
    assert scale_page.tables_of_fixes() in page
    assert f"({scale_page.PICTURE.name})" in page
    shown = re.findall(r"<!-- (.*?) -->", scale_page.PICTURE.read_text(encoding="utf-8"))
    assert all(title in shown for *_, title in scale_page.PANELS)


@pytest.fixture(scope="module")
def of_zarr(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Of both sides the counts of four ranks, which save twenty arrays of two chunks."""
    found = {}
    for side, delivery in (("upstream", "none"), ("ours", "hook")):
        on: dict[str, Any] = {"tree": tree("megatron-core", "0.15.3"), "delivery": delivery}
        out = tmp_path_factory.mktemp(side)
        found[side] = run_json("counting", "zarr", out, "--ranks", "4", "--chunks", "40", **on)["save"]
    return found


def test_no_rank_makes_the_chunk_files_of_others(of_zarr: dict[str, list[dict[str, Any]]]) -> None:
    """Those of the second tensor-parallel rank, twenty, its two data-parallel ranks make."""
    created = [rank["created"] for rank in of_zarr["ours"]]
    assert sum(created[2:]) >= 20
    assert sum(created) <= sum(rank["created"] for rank in of_zarr["upstream"])


def test_a_save_by_byte_ranges_opens_and_writes_no_more_than_upstreams(
    of_zarr: dict[str, list[dict[str, Any]]],
) -> None:
    for name in ("messages", "opened", "metadata", "written"):
        ours, upstream = (sum(rank[name] for rank in of_zarr[side]) for side in ("ours", "upstream"))
        assert ours <= upstream, name
