"""async_dead_worker, nvrx_dead_worker: after a worker ends, all ranks raise an error at their next call."""

from pathlib import Path
from typing import Any

import pytest

from upstream import affected, newest_by_default, run_json, tree

pytestmark = pytest.mark.slow

PACKAGES = {"async_dead_worker": "megatron-core", "nvrx_dead_worker": "nvidia-resiliency-ext"}
CASES = [
    pytest.param(package, *each.values, id=f"{package}-{each.values[0]}", marks=each.marks)
    for fix, package in PACKAGES.items()
    for each in newest_by_default(affected(fix))
]
KILLED = "found it ended with exit code -9"
ELSEWHERE = "found that of a rank ended"

ALL = pytest.mark.exhaustive
each_release = pytest.mark.parametrize(("package", "version"), CASES)


def told(package: str, version: str, delivery: str, folder: Path, *what: str) -> Any:
    return run_json("dead_worker", folder, *what, tree=tree(package, version), delivery=delivery)


@pytest.mark.parametrize("how", [pytest.param((), id="poll"), pytest.param(("--blocking",), id="wait", marks=ALL)])
@pytest.mark.parametrize("what", ["staging", "scheduled", "writing", "forked"])
@each_release
def test_all_ranks_raise_at_the_next_call(
    package: str, version: str, what: str, how: tuple[str, ...], tmp_path: Path
) -> None:
    other, ended = told(package, version, "hook", tmp_path, what, *how)
    assert KILLED in ended
    assert ELSEWHERE in other


@each_release
def test_who_asks_no_other_rank_raises_alone(package: str, version: str, tmp_path: Path) -> None:
    other, ended = told(package, version, "hook", tmp_path, "writing", "--alone")
    assert KILLED in ended
    assert other == ""


@pytest.mark.slow
@pytest.mark.parametrize(("what", "found"), [("staging", "TimeoutError: waits"), ("forked", "")])
@each_release
def test_upstream_waits_or_says_nothing(package: str, version: str, what: str, found: str, tmp_path: Path) -> None:
    assert told(package, version, "none", tmp_path, what, "--ranks", "1", "--blocking") == [found]
