"""Each row of `make stacks` names installable packages, and its result is what was found there."""

import re
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from ckpt_patches.engine.registry import CORE, DEEPSPEED, NVRX, PACKAGES
from ckpt_patches.engine.releases import newest
from stacks import environments
from stacks.__main__ import failures, installed
from stacks.environments import Environment, NotInstalled
from stacks.rows import BY_NAME, ROWS, Row

pytestmark = pytest.mark.quick
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_names_what_can_be_installed(row: Row) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z0-9.]+)*", row.name)
    assert row.python in PYTHONS
    assert re.fullmatch(r"\d+\.\d+\.\d+", row.torch)
    assert row.megatron or row.deepspeed
    assert row.is_commit is bool(row.formats_of)
    assert not row.megatron or row.megatron_release in PACKAGES[CORE].releases
    assert row.deepspeed in ("", *PACKAGES[DEEPSPEED].releases)
    assert row.nvrx in ("", *PACKAGES[NVRX].releases)


def test_rows_are_distinct() -> None:
    assert len(BY_NAME) == len({row.title for row in ROWS}) == len({row.contents for row in ROWS}) == len(ROWS)


def test_one_row_has_the_newest_releases() -> None:
    row = BY_NAME["newest"]
    assert (row.megatron, row.deepspeed) == (newest("megatron-core"), newest("deepspeed"))


def test_the_python_of_a_row_is_one_that_its_megatron_core_supports() -> None:
    """Rows with megatron-core 0.17 and later have Python 3.12 or 3.13, as its wheels require."""
    known = PACKAGES[CORE].releases
    newer = [row for row in ROWS if row.megatron_release in known[known.index("0.17.0") :]]
    assert newer
    assert {row.python for row in newer} <= {"3.12", "3.13"}


def test_an_environment_has_what_its_row_names() -> None:
    here, numpy = Environment(Path(sys.prefix)), metadata.version("numpy")
    row = replace(BY_NAME["bridge_main"], torch=metadata.version("torch"), others=(f"numpy=={numpy}",))
    environments.check(row, here)
    with pytest.raises(NotInstalled, match=f"expected numpy!={numpy} in the environment, found {numpy}"):
        environments.check(replace(row, others=(f"numpy!={numpy}",)), here)
    with pytest.raises(NotInstalled, match=r"expected megatron-core==0\.12\.0 in the environment, found none"):
        environments.check(replace(row, megatron="0.12.0", formats_of=""), here)


FOUND = {
    "on": {"Python": "3.12.1", "torch": "2.11.0", "megatron-core": "0.18.0"},
    "fixes": {"a": "works", "b": "not needed"},
    "tools": {"megatron: audit": "works"},
    "explorer": {"megatron": {"right": 5, "loud": 2, "SILENT": 0}},
}


def test_what_does_not_work_in_a_row() -> None:
    assert failures(FOUND) == []
    assert failures({**FOUND, "fixes": {"a": "works", "d": "the bug shows with the fix: lost"}}) == [
        "d: the bug shows with the fix: lost"
    ]
    assert failures({**FOUND, "tools": {"megatron: migrate": "failed: no"}}) == ["megatron: migrate: failed: no"]
    silent = {"megatron": {"right": 5, "SILENT": 1, "silent cases": ["a moment differs"]}}
    assert failures({**FOUND, "explorer": silent}) == ["explorer, silent: a moment differs"]


def test_a_row_that_did_not_run_does_not_work() -> None:
    row = BY_NAME["verl_0.9"]
    assert failures({"not run": "no torch"}) == ["not run: no torch"]
    assert installed(row, {"not run": "no torch"}) == row.contents
    assert installed(row, FOUND) == "Python 3.12.1, torch 2.11.0, megatron-core 0.18.0"
