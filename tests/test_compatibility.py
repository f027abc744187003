"""The compatibility page: a cell is a recorded result, and what was not recorded says so."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

import compatibility
import upstream
from ckpt_patches.engine.fix import folder, package_of
from ckpt_patches.engine.registry import FIXES

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


def on_main(fix: str, delivery: str, commit: str = "a" * 40, **more: str) -> dict[str, str]:
    dated = {"fix": fix, "commit": commit, "commit_date": "2026-01-01"}
    return {**result("main", delivery, **more), **dated}


def test_a_main_branch_is_a_commit_and_a_date() -> None:
    record = {
        "a": on_main("torch_adam_step", "none"),
        "b": on_main("torch_adam_step", "hook"),
        "c": on_main("torch_adam_step", "in place", commit="b" * 40),
        "d": on_main("torch_adam_step", "plan", words="applies"),
        "e": on_main("numpy2_product", "plan", words="fixed upstream"),
        "f": on_main("dp_zero_empty_state", "plan", outcome="failed", reason="E  no match"),
        "g": on_main("hybrid_offload_reload", "hook", outcome="skipped", reason="needs an H100"),
    }
    page = compatibility.page(record)
    sections = {text.partition("\n")[0]: text.splitlines() for text in page.split("\n## ")[1:]}
    ours, other = "main aaaaaaaaaa, 2026-01-01", "main bbbbbbbbbb, 2026-01-01"
    assert sections["torch_adam_step"].count(f"| {ours} | bug shown | fixed | planned (applies), not run |") == 1
    assert f"| {other} | not run | not run | fixed |" in sections["torch_adam_step"]
    planned = "planned (fixed upstream), not run"
    assert f"| {ours} | {planned} | {planned} | {planned} |" in sections["numpy2_product"]
    assert f"- {ours}, plan, failed: E  no match" in sections["dp_zero_empty_state"]
    assert f"| {ours} | not run | skipped | not run |" in sections["hybrid_offload_reload"]
    assert f"- {ours}, import hook, skipped: needs an H100" in sections["hybrid_offload_reload"]
    assert f"| {ours} | not run | not run | not run |" in sections["zarr_range_write"]  # no claim, and said
    assert "main" not in " ".join(sections["zero3_fragment_bounds"])  # of another package


unless_made = pytest.mark.skipif(upstream.all_releases(), reason="the records are being made")


@unless_made
@pytest.mark.parametrize("fix", FIXES)
def test_the_table_of_a_fix_is_that_of_the_records(fix: str) -> None:
    table = compatibility.section(fix, list(compatibility.recorded().values()))
    assert f"\n{table}\n" in compatibility.PAGE.read_text(), "make compatibility"


@unless_made
def test_the_page_has_nothing_else() -> None:
    """The tables are in the order of the fixes."""
    head, *tables = re.split(r"(?m)^(?=## )", compatibility.PAGE.read_text())
    assert head == compatibility.page(compatibility.recorded()).partition("## ")[0], "make compatibility"
    of_fixes = [table.split()[1] for table in tables]
    assert of_fixes == [fix for fix in FIXES if fix in of_fixes], "make compatibility"


def claims_of_main(text: str) -> list[str]:
    """The paragraphs, lines of tables and lines of code that speak of a main branch, and not of which commit."""
    text = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", text)
    parts = re.split(r"\n\s*\n|\n(?=\||- )|(?<=\",)\n", text)
    spoken = [" ".join(part.split()) for part in parts if re.search(r"\bmain\b(?!\s+param|\()", part, re.IGNORECASE)]
    dated = re.compile(r"\b[0-9a-f]{10,40}\b.*\b20\d\d-\d\d-\d\d\b|\bcompatibility\.md\b")
    return [part for part in spoken if not dated.search(part)]


@pytest.mark.parametrize(
    "text",
    [
        "| fix | megatron-core 0.12.0 \u2013 main |",
        "megatron-core 0.12.0 to\nmain, with offload",
        '    affected="megatron-core 0.12.0 to main",\n    test="0123456789 2026-01-01"',
        "megatron-core, main of 2026-01-01",
        "- on main\n- at 0123456789 of 2026-01-01",
    ],
)
def test_a_claim_without_a_commit_is_found(text: str) -> None:
    assert len(claims_of_main(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "the fp32 main\nparameters",
        "`python -m main`, `ds_to_universal.main`",
        "on main (0123456789, 2026-01-01)",
        "main: see [the table](compatibility.md)",
        "| main 0123456789, 2026-01-01 | fixed |",
    ],
)
def test_what_claims_nothing_is_let_pass(text: str) -> None:
    assert claims_of_main(text) == []


def test_main_stands_nowhere_without_a_commit() -> None:
    pages = [*upstream.REPOSITORY.glob("*.md"), *upstream.REPOSITORY.glob("docs/*.md")]
    fixes = [Path(folder(package)) / f"{name}.py" for name in FIXES for package in [package_of(name)]]
    assert len(pages) > 10
    found = {path.name: claims_of_main(path.read_text()) for path in (*pages, *fixes)}
    assert {name: claims for name, claims in found.items() if claims} == {}


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
    for variable in ("CKPT_PATCHES_TEST_ALL", "CKPT_PATCHES_TEST_REST", *upstream.MAIN_VARIABLES.values()):
        monkeypatch.delenv(variable, raising=False)
    tests = pytester.mkdir("tests")
    (tests / "conftest.py").write_text((Path(upstream.__file__).parent / "conftest.py").read_text())
    return pytester


def test_outcomes_are_recorded_and_merged(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_outcomes_on_a_main_branch_are_recorded_with_its_commit(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any run, beside those on releases, which only a run over all of them records."""
    checkout = project.mkdir("checkout")
    (checkout / "file").write_text("")
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        subprocess.run([*git, *command], env={**os.environ, "GIT_COMMITTER_DATE": "2026-01-02T03:04:05Z"}, check=True)
    monkeypatch.setenv("CKPT_PATCHES_TEST_MEGATRON_MAIN", str(checkout))
    monkeypatch.setenv("PYTHONPATH", str(upstream.REPOSITORY / "tests"))
    (project.path / "tests" / "test_one.py").write_text(TESTS.replace('"0.7.0"', '"0.7.0", "main"'))
    project.runpytest_subprocess("--rootdir=.", "tests").assert_outcomes(passed=2, failed=1)
    recorded = project.path / "tests" / "recorded"
    assert [path.name for path in recorded.glob("*.json")] == ["main.json"]
    found = json.loads((recorded / "main.json").read_text())
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    assert {(cell["commit"], cell["commit_date"]) for cell in found.values()} == {(commit, "2026-01-02")}
    assert {test.partition("::")[2]: cell["outcome"] for test, cell in found.items()} == {
        "test_fix[main-none]": "passed",
        "test_fix[main-hook]": "passed",
        "test_fix[main-in place]": "failed",
    }


def test_the_default_run_is_of_the_newest_release_by_the_hook_and_the_rest_of_all_else(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = TESTS + "\n@pytest.mark.slow\ndef test_slow():\n    pass\n"
    (project.path / "tests" / "test_one.py").write_text(marked)
    default = {"test_fix[0.8.0-none]", "test_fix[0.8.0-hook]"}
    rest = {"test_slow", "test_fix[0.8.0-in place]", *(f"test_fix[0.7.0-{d}]" for d in ("none", "hook", "in place"))}
    assert collected(project) == default
    monkeypatch.setenv("CKPT_PATCHES_TEST_REST", "1")
    assert collected(project) == rest
    monkeypatch.setenv("CKPT_PATCHES_TEST_ALL", "1")
    assert collected(project) == default | rest


def collected(project: pytest.Pytester) -> set[str]:
    done = project.runpytest_subprocess("--rootdir=.", "--collect-only", "-q", "tests")
    return {line.partition("::")[2] for line in done.outlines if "::" in line}


def test_a_marked_test_without_parameters_is_refused(project: pytest.Pytester) -> None:
    (project.path / "tests" / "test_one.py").write_text(TESTS.replace("delivery", "other"))
    done = project.runpytest_subprocess("--rootdir=.", "tests")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*marked compat, expected the parameters `version` and `delivery`*"])


def test_without_the_hook_nothing_is_tested(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    (project.path / "tests" / "test_one.py").write_text(TESTS)
    monkeypatch.setenv("CKPT_PATCHES", "off")
    monkeypatch.setenv("CKPT_PATCHES_TEST_ALL", "1")
    done = project.runpytest_subprocess("--rootdir=.", "tests")
    assert done.ret == 2
    done.stdout.fnmatch_lines(["*expected the import hook in sys.meta_path*"])
