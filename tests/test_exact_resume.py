"""A resume is exact: every optimizer, checkpoint format and release, at the same and at another data-parallel size.

What the runs find is the table of docs/resume.md.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import resume_table
from megatron_resumes import SOME_HYBRID, inner_optimizers, refused_by_upstream, resumes
from recorded_results import EN_DASH, read
from upstream import all_releases, newest_by_default, numbers, releases


def cases() -> list[Any]:
    """Release, delivery, inner optimizer, and on how many ranks what two have saved is resumed."""
    return [
        pytest.param(
            *release.values,
            delivery,
            inner,
            ranks,
            id=f"{release.id}-{delivery}-{inner}-{ranks}",
            marks=[] if (delivery, inner, ranks) == ("hook", "fused", 2) else [pytest.mark.slow],
        )
        for release in newest_by_default(releases("megatron-core"))
        for delivery in ("none", "hook")
        for inner in inner_optimizers(str(release.id))
        for ranks in (2, 4)
        if all_releases() or (delivery, inner) == ("hook", "fused") or (inner, ranks) == ("torch", 2)
    ]


@pytest.mark.parametrize(("version", "delivery", "inner", "ranks"), cases())
def test_a_resume_is_exact(
    version: str, delivery: str, inner: str, ranks: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    rows = resumes(version, inner, delivery, ranks, tmp_path).rows
    record_property("resume", [{**row, "version": version, "delivery": delivery} for row in rows])
    refused = {row["optimizer"] for row in rows if row["result"].startswith("refused")}
    assert refused == refused_by_upstream(version, inner)
    inexact = [row for row in rows if row["optimizer"] not in refused and not resume_table.exact(row)]
    if delivery == "hook":
        assert inexact == []
    elif numbers(version) >= (0, 12):
        assert {row["optimizer"] for row in inexact} >= set(SOME_HYBRID)


@pytest.mark.skipif(all_releases(), reason="such a run writes the record anew, and then the page")
def test_the_page_is_that_of_the_record() -> None:
    page = resume_table.PAGE.read_text(encoding="utf-8")
    assert page.startswith(resume_table.page(read(resume_table.RECORD))), "make compatibility"
    assert resume_table.across(read(resume_table.ACROSS)) in page, "make compatibility"


def test_rounding_of_another_split_is_not_taken_for_a_loss() -> None:
    row = {"inner": "fused", "optimizer": "hybrid-0.5", "ranks": 4, "format": "torch"}
    assert resume_table.exact({**row, "result": "bit-equal"})
    assert resume_table.exact({**row, "result": "differs by 1.5e-08, the loaded state is bit-equal"})
    assert not resume_table.exact({**row, "result": "differs by 1.5e-08"})
    assert not resume_table.exact({**row, "result": "differs by 0.01, the loaded state is bit-equal"})
    assert not resume_table.exact({**row, "ranks": 2, "result": "differs by 1.5e-08, the loaded state is bit-equal"})
    assert not resume_table.exact(
        {**row, "optimizer": "plain", "result": "differs by 1.5e-08, the loaded state is bit-equal"}
    )


def test_the_page_says_what_was_found_and_nothing_else() -> None:
    row = {"version": "0.16.1", "inner": "fused", "optimizer": "hybrid-1.0", "format": "torch"}
    found = [
        {**row, "ranks": 2, "delivery": "none", "result": "load died: KeyError: 'step'"},
        {**row, "ranks": 2, "delivery": "hook", "result": "bit-equal"},
        {**row, "ranks": 4, "delivery": "hook", "result": "bit-equal"},
        {**row, "format": "other", "ranks": 2, "delivery": "hook", "result": "differs by 0.1"},
    ]
    page = resume_table.page({"test": found})
    assert "| fused | hybrid-1.0 | 0.16.1 | exact (upstream: KeyError / not run) |" in page.partition("## other")[0]
    assert "| fused | hybrid-1.0 | 0.16.1 | **differs by 0.1** / not run (upstream: not run) |" in page
    assert "0.15.3" not in page


def test_releases_and_optimizers_with_the_same_results_share_a_row() -> None:
    results = {"0.15.3": "bit-equal", "0.16.0": "bit-equal", "0.16.1": "differs by 0.1", "0.17.0": "bit-equal"}
    rows = [
        {"inner": "fused", "optimizer": optimizer, "format": "torch", "ranks": ranks, "delivery": delivery}
        | {"version": version, "result": result}
        for version, result in results.items()
        for optimizer in ("hybrid-1.0", "plain")
        for ranks in (2, 4)
        for delivery in ("none", "hook")
    ]
    lines = [line for line in resume_table.page({"test": rows}).splitlines() if line.startswith("| fused")]
    assert lines == [
        f"| fused | plain, hybrid-1.0 | 0.15.3{EN_DASH}0.16.0, 0.17.0 | exact |",
        "| fused | plain, hybrid-1.0 | 0.16.1 | **differs by 0.1** (upstream: differs) |",
    ]
