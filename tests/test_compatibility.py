"""The compatibility page: a cell is a recorded result, and what was not recorded says so."""

from pathlib import Path

import pytest

import compatibility
import upstream

pytest_plugins = ["pytester"]


def result(version: str, delivery: str, outcome: str = "passed", words: str = "", reason: str = "") -> dict[str, str]:
    return {
        "fix": "zarr_create_synchronizer",
        "version": version,
        "delivery": delivery,
        "outcome": outcome,
        "words": words,
        "reason": reason,
        "date": "2026-01-02",
        "python": "3.11.7",
        "torch": "2.13.0",
    }


def test_cells() -> None:
    record = {
        "a": result("0.12.0", "none"),
        "b": result("0.12.0", "hook"),
        "c": result("0.12.0", "in place"),
        "d": result("0.12.0", "in place", "failed", reason="E  AssertionError: lost"),
        "e": result("0.16.1", "hook", words="not present"),
        "g": result("0.16.0", "hook", words="not present"),
        "h": result("0.16.0", "in place", words="not present"),
        "f": result("0.14.0", "hook", "skipped", reason="needs a GPU"),
    }
    lines = compatibility.page(record).splitlines()
    assert "| 0.12.0 | bug shown | fixed | **FAILED** |" in lines
    assert "| 0.16.1 | not run | not present | not run |" in lines
    assert "| 0.16.0 | - | not present | not present |" in lines
    assert "| 0.14.0 | not run | skipped | not run |" in lines
    assert "- 0.14.0, import hook, skipped: needs a GPU" in lines
    assert "- 0.12.0, in place, failed: E  AssertionError: lost" in lines
    assert "Recorded: 2026-01-02, Python 3.11.7, torch 2.13.0." in lines


def test_nothing_recorded_claims_nothing() -> None:
    page = compatibility.page({})
    rows = [line for line in page.splitlines() if line.startswith("| 0.")]
    assert rows
    noted = {release.version for release in upstream.RELEASES if release.note}
    assert all(line.count("not run") == 3 for line in rows if line.split()[1] not in noted)


def test_unknown_fix_is_refused() -> None:
    with pytest.raises(ValueError, match="no such fix: typo"):
        compatibility.page({"a": {**result("0.12.0", "none"), "fix": "typo"}})


TESTS = """
import pytest

@pytest.mark.compat(fix="numpy2_product")
@pytest.mark.parametrize("delivery", ["none", "hook", "in place"])
@pytest.mark.parametrize("version", ["0.7.0", pytest.param("0.8.0", marks=pytest.mark.skip(reason="cannot"))])
def test_fix(version, delivery, record_property):
    record_property("compat", "words")
    assert delivery != "in place"
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("CKPT_PATCHES_TEST_ALL", raising=False)
    tests = pytester.mkdir("tests")
    (tests / "conftest.py").write_text((Path(upstream.__file__).parent / "conftest.py").read_text())
    return pytester


def test_outcomes_are_recorded_and_merged(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    record = project.path / "tests" / "recorded" / "compatibility.json"
    (project.path / "tests" / "test_one.py").write_text(TESTS)
    project.runpytest_subprocess("--rootdir=.", "tests")
    assert not record.exists()  # not a run over all releases
    record.parent.mkdir()
    monkeypatch.setenv("CKPT_PATCHES_TEST_ALL", "1")
    record.write_text('{"tests/test_earlier.py::test": {"outcome": "passed"}}')
    project.runpytest_subprocess("--rootdir=.", "tests").assert_outcomes(passed=2, failed=1, skipped=3)
    found = json.loads(record.read_text())
    outcomes = {test.partition("::")[2]: cell["outcome"] for test, cell in found.items()}
    assert outcomes == {
        "test": "passed",
        "test_fix[0.7.0-none]": "passed",
        "test_fix[0.7.0-hook]": "passed",
        "test_fix[0.7.0-in place]": "failed",
        **{f"test_fix[0.8.0-{delivery}]": "skipped" for delivery in ("none", "hook", "in place")},
    }
    assert found["tests/test_one.py::test_fix[0.7.0-hook]"]["words"] == "words"
    assert found["tests/test_one.py::test_fix[0.8.0-hook]"]["reason"] == "cannot"


def test_the_default_run_writes_in_place_on_the_newest_release_alone(project: pytest.Pytester) -> None:
    (project.path / "tests" / "test_one.py").write_text(TESTS)
    done = project.runpytest_subprocess("--rootdir=.", "--collect-only", "-q", "tests")
    done.stdout.fnmatch_lines(["*5/6 tests collected (1 deselected)*"])
    done.stdout.no_fnmatch_line("*0.7.0-in place*")


def test_a_marked_test_without_parameters_is_refused(project: pytest.Pytester) -> None:
    (project.path / "tests" / "test_one.py").write_text(TESTS.replace("delivery", "other"))
    done = project.runpytest_subprocess("--rootdir=.", "tests")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*marked compat, expected the parameters `version` and `delivery`*"])


def test_without_the_hook_nothing_is_tested(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    (project.path / "tests" / "test_one.py").write_text(TESTS)
    monkeypatch.setenv("CKPT_PATCHES", "off")
    done = project.runpytest_subprocess("--rootdir=.", "tests")
    assert done.ret == 2
    done.stdout.fnmatch_lines(["*expected the import hook in sys.meta_path*"])
