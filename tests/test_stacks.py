"""The rows of `make stacks`: each names what can be installed, and is recorded, or not run with a reason."""

import re

import pytest

from ckpt_patches.engine.registry import CORE, DEEPSPEED, NVRX
from ckpt_patches.engine.releases import RECORDED, newest
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
    """Its wheels ask for 3.12 since 0.17."""
    newer = [row for row in ROWS if row.megatron_release in RECORDED[CORE][RECORDED[CORE].index("0.17.0") :]]
    assert newer
    assert {row.python for row in newer} <= {"3.12", "3.13"}
