"""Recorded results: every row of every release is read back as written, and equal rows are stored once."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorded_results import EN_DASH, add, ranges, read, write
from upstream import REPOSITORY

VERSIONS = st.sampled_from(["0.9.0", "0.10.0", "0.10.1", "main"])
ROWS = st.lists(
    st.fixed_dictionaries({"result": st.text(max_size=5), "ranks": st.integers(1, 2)}), min_size=1, max_size=4
)


def node(version: str, delivery: str = "hook") -> str:
    return f"tests/test_main.py::test_resume[{version}-{delivery}]"


def in_order(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


@given(rows=st.dictionaries(st.tuples(VERSIONS, st.sampled_from(["none", "hook"])), ROWS))
def test_what_is_read_is_what_was_written(rows: dict[tuple[str, str], Any], tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("recorded") / "results.json"
    record = {
        node(version, delivery): [{**row, "version": version} for row in of_one]
        for (version, delivery), of_one in rows.items()
    }
    write(path, record)
    found = read(path)
    assert list(found) == sorted(record)
    assert {test: in_order(of_one) for test, of_one in found.items()} == {
        test: in_order(of_one) for test, of_one in record.items()
    }


def test_equal_results_of_releases_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write(path, {node(version): [{"version": version, "result": "exact"}] for version in ("0.10.0", "0.9.0")})
    assert path.read_text().splitlines()[1:3] == [
        '"tests/test_main.py::test_resume[*-hook]": [',
        '{"result": "exact", "releases": "0.9.0 0.10.0"}',
    ]


def test_a_later_run_replaces_the_rows_of_its_tests_alone(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    earlier = {node(version): [{"version": version, "result": "differs"}] for version in ("0.9.0", "main")}
    add(path, earlier)
    later = {node("main"): [{"version": "main", "result": "exact"}]}
    add(path, later)
    add(path, {})
    assert read(path) == {**earlier, **later}


@pytest.mark.parametrize(
    "test", ["tests/test_a.py::test", "tests/test_a.py::test[*-0.9.0]", "tests/test_a.py::test[0.8.0]"]
)
def test_a_test_without_its_release_is_refused(test: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected the release 0\.9\.0 in its parameters"):
        write(tmp_path / "results.json", {test: [{"version": "0.9.0"}]})


def test_the_records_of_the_repository_are_as_they_are_written(tmp_path: Path) -> None:
    names = ("compatibility", "checkouts")
    for path in (REPOSITORY / "tests" / "recorded" / f"{name}.json" for name in names):
        write(tmp_path / path.name, read(path))
        assert (tmp_path / path.name).read_text(encoding="utf-8") == path.read_text(encoding="utf-8")


def test_recorded_data_is_small() -> None:
    """Recorded data takes at most 2 MB, so that a clone and a review stay small."""
    folder = REPOSITORY / "tests" / "recorded"
    assert sum(path.stat().st_size for path in folder.glob("*.json")) <= 2_000_000


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ("", ""),
        ("0.14.0", "0.14.0"),
        ("0.13.0 0.12.0 0.14.0", f"0.12.0{EN_DASH}0.14.0"),
        ("0.12.0 0.14.0 0.15.0", f"0.12.0, 0.14.0{EN_DASH}0.15.0"),
    ],
)
def test_a_range_has_every_release_that_lies_in_it(versions: str, expected: str) -> None:
    assert ranges(versions.split(), ["0.12.0", "0.13.0", "0.14.0", "0.15.0"]) == expected
