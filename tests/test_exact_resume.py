"""A resume is exact: every optimizer, checkpoint format and release, at the same and at another data-parallel size.

What the runs find is the table of docs/resume.md.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import resume_table
from upstream import all_releases, checkpoint_formats, newest_by_default, numbers, releases, run, tree

PLAIN = ["plain", "precision-aware"]
HYBRID = [
    "-".join(word for word in ("hybrid", fraction, *words) if word)
    for fraction, *words in itertools.product(("0.0", "0.5", "1.0"), ("", "precision-aware"), ("", "overlap"))
]
# In the default run; `make test-all` takes all.
SOME_HYBRID = ["hybrid-0.0", "hybrid-0.5", "hybrid-0.5-precision-aware-overlap", "hybrid-1.0-precision-aware"]


def optimizers(version: str) -> list[str]:
    """The optimizers that a release has."""
    if numbers(version) < (0, 11):
        return PLAIN[:1]
    if numbers(version) < (0, 12):
        return PLAIN
    return PLAIN + (HYBRID if all_releases() else SOME_HYBRID)


def inner_optimizers(version: str) -> list[str]:
    """Up to 0.8 megatron-core does not import without Apex, and so always takes Apex's optimizer."""
    return ["fused"] if numbers(version) < (0, 9) else ["fused", "torch"]


def refused_by_upstream(version: str, inner: str) -> set[str]:
    """The optimizers that a release does not build: 0.9 none at all without Apex or Transformer Engine."""
    if inner == "fused":
        return set()
    return set(optimizers(version)) if numbers(version) < (0, 10) else {"precision-aware"} & set(optimizers(version))


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
    rows = resumes(version, inner, delivery, ranks, tmp_path)
    record_property("resume", [{**row, "version": version, "delivery": delivery} for row in rows])
    refused = {row["optimizer"] for row in rows if row["result"].startswith("refused")}
    assert refused == refused_by_upstream(version, inner)
    inexact = [row for row in rows if row["optimizer"] not in refused and not resume_table.exact(row)]
    if delivery == "hook":
        assert inexact == []
    elif numbers(version) >= (0, 12):
        assert {row["optimizer"] for row in inexact} >= set(SOME_HYBRID)


def resumes(version: str, inner: str, delivery: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """A row for every optimizer and format."""
    done = run(
        "exact_resume",
        folder / "out",
        *(
            "--formats",
            ",".join(checkpoint_formats(version)),
            "--inner",
            inner,
            "--optimizers",
            ",".join(optimizers(version)),
            "--resume-ranks",
            str(ranks),
        ),
        tree=tree("megatron-core", version),
        delivery=delivery,
        timeout=500,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == len(checkpoint_formats(version)) * len(optimizers(version))
    return rows


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
    assert "| fused | hybrid-1.0 | exact (upstream: KeyError / not run) | **differs by 0.1** / not run" in page
    assert "0.15.3" not in page
