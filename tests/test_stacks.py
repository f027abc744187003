"""Each row of `make stacks` names installable packages, and is recorded, or not run for a stated reason."""

import re
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

import generated
from ckpt_patches.engine.registry import CORE, DEEPSPEED, NVRX
from ckpt_patches.engine.releases import RECORDED, newest
from stacks import environments, page, record
from stacks.environments import Environment, NotInstalled
from stacks.rows import BY_NAME, ROWS, Row
from upstream import REPOSITORY

pytestmark = pytest.mark.quick
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_names_what_can_be_installed(row: Row) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z0-9.]+)*", row.name)
    assert row.python in PYTHONS
    assert re.fullmatch(r"\d+\.\d+\.\d+", row.torch)
    assert row.megatron or row.deepspeed
    assert row.is_commit is bool(row.formats_of)
    assert not row.megatron or row.megatron_release in RECORDED[CORE]
    assert row.deepspeed in ("", *RECORDED[DEEPSPEED])
    assert row.nvrx in ("", *RECORDED[NVRX])


def test_rows_are_distinct() -> None:
    assert len(BY_NAME) == len({row.title for row in ROWS}) == len({row.contents for row in ROWS}) == len(ROWS)


def test_the_edges_are_the_newest_and_the_oldest_releases() -> None:
    edges = BY_NAME["newest"], BY_NAME["oldest"]
    assert [row.megatron for row in edges] == [newest("megatron-core"), RECORDED[CORE][0]]
    assert [row.deepspeed for row in edges] == [newest("deepspeed"), RECORDED[DEEPSPEED][0]]


def test_the_python_of_a_row_is_one_that_its_megatron_core_supports() -> None:
    """Rows with megatron-core 0.17 and later have Python 3.12 or 3.13, as its wheels require."""
    newer = [row for row in ROWS if row.megatron_release in RECORDED[CORE][RECORDED[CORE].index("0.17.0") :]]
    assert newer
    assert {row.python for row in newer} <= {"3.12", "3.13"}


def test_the_page_is_that_of_the_record() -> None:
    text = (REPOSITORY / "docs" / "compatibility.md").read_text()
    assert generated.block(text, "stacks") == page.section().splitlines(), "make compatibility"


def test_a_recorded_row_is_one_of_the_table() -> None:
    assert record.read().keys() <= BY_NAME.keys()


def test_each_exception_is_a_known_limit() -> None:
    limits = (REPOSITORY / "docs" / "limits.md").read_text()
    named = {name for found in record.read().values() for name in page.exceptions(found)}
    assert [name for name in sorted(named) if f"`{name}`" not in limits] == []


def test_an_environment_has_what_its_row_names() -> None:
    here, numpy = Environment(Path(sys.prefix)), metadata.version("numpy")
    row = replace(BY_NAME["bridge_main"], torch=metadata.version("torch"), others=(f"numpy=={numpy}",))
    environments.check(row, here)
    with pytest.raises(NotInstalled, match=f"expected numpy!={numpy} in the environment, found {numpy}"):
        environments.check(replace(row, others=(f"numpy!={numpy}",)), here)
    with pytest.raises(NotInstalled, match=r"expected megatron-core==0\.12\.0 in the environment, found none"):
        environments.check(replace(row, megatron="0.12.0", formats_of=""), here)


FOUND = {
    "date": "2026-01-02",
    "on": {"Python": "3.12.1", "torch": "2.11.0", "megatron-core": "0.18.0"},
    "fixes": {"works": "a b", "not present": "c", "the bug shows with the fix: lost": "d"},
    "tools": {"megatron: audit": "works"},
    "flattened": "failed: no",
    "explorer": {"megatron": {"right": 5, "loud": 2, "SILENT": 1, "not trained": 3}},
}


def test_a_line_of_the_page() -> None:
    row = BY_NAME["verl_0.9"]
    assert page.cells(row, FOUND) == [
        "verl 0.9",
        "Python 3.12.1, torch 2.11.0, megatron-core 0.18.0; 2026-01-02",
        "2 fixes; audit; explorer: 5 right, 2 loud",
        "not present: 1; [exceptions](limits.md#stacks): `d`; megatron: migrate: failed: no; explorer: 1 silent; "
        "explorer: 3 not trained",
    ]


def test_what_was_not_run_claims_nothing() -> None:
    row = BY_NAME["verl_0.9"]
    assert page.cells(row, {})[2:] == ["", "not run"]
    assert page.cells(row, {"date": "2026-01-02", "not run": "no torch"})[2:] == ["", "not run: no torch"]
