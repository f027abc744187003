"""A checkpoint of one release of the real megatron-core resumes exactly in a later one, or is refused.

What the runs find is a table of docs/resume.md.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import resume_table
import shared
from upstream import all_releases, newest, numbers, run_lines, tree

RELEASES = ("0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.18.2", newest("megatron-core"))
PAIRS = [(old, new) for new in RELEASES for old in RELEASES if numbers(old) <= numbers(new)]
if not all_releases():
    PAIRS = [("0.18.2", newest("megatron-core"))]
# Upstream's own words, since 0.16, for the default format of 0.14 and before.
REFUSED = "load died: CheckpointingException: ShardedTensor.flattened_range is not supported."


def default_format(version: str) -> str:
    """What Megatron-LM saves in where nothing else is asked for."""
    return "dp_reshardable" if numbers(version) >= (0, 15) else "fully_sharded_model_space"


def exact_resume(version: str, delivery: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    return run_lines("exact_resume", folder, *options, tree=tree("megatron-core", version), delivery=delivery)


@pytest.mark.parametrize("inner", ["fused", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("delivery", [pytest.param("none", marks=pytest.mark.slow), "hook"])
@pytest.mark.parametrize(("saved_by", "version"), PAIRS)
def test_a_later_release_resumes_exactly_or_refuses(
    saved_by: str, version: str, delivery: str, inner: str, record_property: Callable[[str, object], None]
) -> None:
    name = default_format(saved_by)
    options = ("--formats", name, "--inner", inner)

    def save(folder: Path) -> None:
        exact_resume(saved_by, delivery, folder, *options, "--only", "save")

    saved = shared.once(f"saved-by-{saved_by}-{delivery}-{inner}", save)
    rows = exact_resume(version, delivery, saved, *options, "--only", "resume")
    assert [row["ranks"] for row in rows] == [2, 4]
    record_property("across", [{**row, "saved_by": saved_by, "version": version, "delivery": delivery} for row in rows])
    if delivery == "hook":
        expected = REFUSED if refuses(version, name) else "bit-equal"
        assert {row["result"] for row in rows} == {expected}


def refuses(version: str, name: str) -> bool:
    return numbers(version) >= (0, 16) and name == "fully_sharded_model_space"


def test_the_table_has_the_pairs_that_were_run() -> None:
    row = {"saved_by": "0.14.0", "version": "0.16.1", "format": "any", "inner": "fused", "optimizer": "plain"}
    rows = [{**row, "ranks": n, "delivery": how, "result": REFUSED} for n in (2, 4) for how in ("none", "hook")]
    lines = resume_table.across({"test": rows})["across"].splitlines()
    assert lines[2:] == ["| 0.14.0, any | refused |", "", "Without the fixes, *fused*: refused."]
