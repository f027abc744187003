"""A resume is exact: every optimizer, checkpoint format and release, at the same and at another data-parallel size.

What the runs find is a table of docs/resume.md.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import generated
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
    assert generated.filled(page, resume_table.blocks()) == page, "make compatibility"


def test_every_combination_was_run_at_both_sizes_with_the_fixes_and_without() -> None:
    rows = [row for found in read(resume_table.RECORD).values() for row in found]
    keys = ("version", "inner", "optimizer", "format")
    runs = {(*(row[key] for key in keys), row["ranks"], row["delivery"]) for row in rows}
    assert runs == {(*run[:4], ranks, how) for run in runs for ranks in (2, 4) for how in ("none", "hook")}


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


def rows_of(results: Mapping[str, str], **found: object) -> list[dict[str, Any]]:
    """A row for each release."""
    row = {"inner": "fused", "optimizer": "plain", "format": "torch", "ranks": 2, "delivery": "none"}
    return [{**row, **found, "version": version, "result": result} for version, result in results.items()]


def test_the_table_has_what_was_found_and_nothing_else() -> None:
    """Releases with the same results are ranges, optimizers with the same results one row."""
    results = {"0.15.3": "bit-equal", "0.16.0": "bit-equal", "0.16.1": "load died: KeyError: 'step'"}
    rows = [row for name in ("plain", "precision-aware") for row in rows_of(results, optimizer=name)]
    rows += rows_of({"0.17.0": "differs by 0.1"}, optimizer="hybrid-1.0-overlap", format="dp_reshardable")
    blocks = resume_table.megatron({"test": rows})
    assert blocks["megatron-core without"].splitlines()[2:] == [
        f"| fused / fused + precision-aware | exact 0.15.3{EN_DASH}0.16.0; KeyError 0.16.1 |  |",
        "| fused + offload |  | differs |",
    ]


def test_what_is_not_exact_with_the_fixes_is_listed() -> None:
    rows = [
        *rows_of({"0.16.0": "bit-equal", "0.16.1": "differs by 0.1"}, delivery="hook"),
        *rows_of({"0.16.0": "bit-equal"}, delivery="hook", format="dp_reshardable"),
        *rows_of({"0.9.0": "refused: as upstream does"}, delivery="hook", inner="torch"),
    ]
    lines = resume_table.megatron({"test": rows})["megatron-core"].splitlines()
    assert lines == [
        f"**With the fixes**, 0.9.0, 0.16.0{EN_DASH}0.16.1: exact, except",
        "",
        "- **differs**: fused, torch: 0.16.1",
        "- *refused*: torch: 0.9.0",
    ]
