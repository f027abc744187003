"""The compatibility page: each cell is a recorded result, or states that nothing was recorded."""

import re
import subprocess
from pathlib import Path

import pytest

import compatibility
import generated
import keeping_up
import recorded_results
import upstream
from ckpt_patches.engine.fix import package_of
from ckpt_patches.engine.registry import FIXES, folder

pytest_plugins = ["pytester"]
PATCHED = ("hook", "in place")


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


def page_of(record: dict[str, dict[str, str]]) -> str:
    return "\n".join(compatibility.blocks(record).values())


def columns(page: str, fix: str = "zarr_create_synchronizer") -> dict[str, str]:
    """A fix's row, by column heading."""
    (row,) = (line for line in page.splitlines() if line.startswith("| ") and f"[`{fix}`]" in line)
    return dict(zip(compatibility.HEADS, row[2:-2].split(" | "), strict=True))


def test_columns() -> None:
    record = {
        "a": result("0.12.0", "none"),
        "b": result("0.12.0", "hook"),
        "c": result("0.12.0", "in place"),
        "d": result("0.12.0", "in place", "failed", reason="E  AssertionError: lost"),
        "e": result("0.16.1", "plan", words="not present"),
        "f": result("0.14.0", "hook", "skipped", reason="needs a GPU"),
        **{f"i {v} {how}": result(v, how) for v in ("0.13.0", "0.13.1") for how in ("none", *PATCHED)},
    }
    page = page_of(record)
    assert columns(page) == {
        "package": "megatron-core",
        "bug and fix shown on": "0.13.0, 0.13.1",
        "fixes": "[`zarr_create_synchronizer`](zarr_create_synchronizer.md)",
    }
    lines = page.splitlines()
    fix = "`zarr_create_synchronizer`"
    assert f"- {fix}, 0.12.0: bug shown / fixed / **FAILED**: E  AssertionError: lost" in lines
    assert f"- {fix}, 0.14.0: not run / skipped / not run: needs a GPU" in lines
    assert not [line for line in lines if line.startswith(f"- {fix}, 0.16.1")]
    assert "Recorded: Python 3.11.7, torch 2.13.0, 2026-01-02." in lines


def test_nothing_recorded_claims_nothing() -> None:
    page = page_of({})
    assert {columns(page, fix)["bug and fix shown on"] for fix in FIXES} == {"not run"}


def test_fixes_that_were_shown_on_the_same_releases_share_a_row() -> None:
    record = {
        f"{fix} {how}": {**result("0.12.2", how), "fix": fix}
        for fix in ("zarr_create_synchronizer", "zarr_range_write")
        for how in ("none", *PATCHED)
    }
    page = page_of(record)
    assert columns(page) == columns(page, "zarr_range_write")
    assert columns(page)["bug and fix shown on"] == "0.12.2"


@pytest.mark.parametrize(
    ("version", "delivery", "kept"),
    [("0.12.2", "hook", True), ("0.13.0", "hook", False), ("0.13.0", "plan", True), ("0.14.0", "in place", True)],
)
def test_runs_are_kept_of_the_releases_of_stacks_and_of_the_newest_with_the_bug(
    version: str, delivery: str, kept: bool
) -> None:
    assert compatibility.is_kept(result(version, delivery)) is kept


def test_the_record_is_of_what_is_kept() -> None:
    for rows in recorded_results.read(compatibility.RECORD).values():
        assert all(map(compatibility.is_kept, rows)), "make compatibility"


def test_releases_that_cannot_be_run_are_named_with_the_reason() -> None:
    lines = page_of({}).splitlines()
    for release in upstream.RELEASES:
        if release.note:
            assert [line for line in lines if line.endswith(f", not run: {release.note}")]


def test_a_checkout_in_the_place_of_a_release_is_a_commit_and_a_date() -> None:
    commit = {"fix": "remainder_rounding", "commit": "a" * 40, "commit_date": "2026-01-01"}
    record = {delivery: {**result("0.1", delivery), **commit} for delivery in ("none", *PATCHED)}
    page = page_of(record)
    assert columns(page, "remainder_rounding")["bug and fix shown on"] == "0.1"
    assert columns(page, "fused_adam_masters")["bug and fix shown on"] == "not run"
    assert page.splitlines().count("- apex 0.1: commit aaaaaaaaaa of 2026-01-01") == 1


@pytest.mark.skipif(upstream.all_releases(), reason="the records are being made")
def test_the_page_is_that_of_the_records() -> None:
    page = compatibility.PAGE.read_text()
    made = {**compatibility.blocks(compatibility.recorded()), "upstream": keeping_up.section(keeping_up.recorded())}
    for name, text in made.items():
        assert generated.block(page, name) == text.splitlines(), "make compatibility"


def claims_of_main(text: str) -> list[str]:
    """The paragraphs, table rows and code lines that mention a main branch without its commit."""
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
        page_of({"a": {**result("0.12.0", "none"), "fix": "typo"}})


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
    for variable in (
        "CKPT_PATCHES_TEST_ALL",
        "CKPT_PATCHES_TEST_FIXES",
        "CKPT_PATCHES_TEST_REST",
        "CKPT_PATCHES_TEST_OLDER",
        *upstream.MAIN_VARIABLES.values(),
        *upstream.CHECKOUT_VARIABLES.values(),
    ):
        monkeypatch.delenv(variable, raising=False)
    tests = pytester.mkdir("tests")
    for name in ("conftest.py", "recorded_results.py"):
        (tests / name).write_text((Path(upstream.__file__).parent / name).read_text())
    return pytester


def test_outcomes_are_recorded_and_merged(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    record = project.path / "tests" / "recorded" / "compatibility.json"
    (project.path / "tests" / "test_one.py").write_text(TESTS)
    project.runpytest_subprocess("--rootdir=.", "tests")
    assert not record.exists()  # not a run over all releases
    monkeypatch.setenv("CKPT_PATCHES_TEST_ALL", "1")
    recorded_results.write(record, {"tests/test_earlier.py::test[0.7.0]": [{"version": "0.7.0", "outcome": "passed"}]})
    project.runpytest_subprocess("--rootdir=.", "tests").assert_outcomes(passed=2, failed=1, skipped=3)
    found = {test: row for test, (row,) in recorded_results.read(record).items()}
    outcomes = {test.partition("::")[2]: cell["outcome"] for test, cell in found.items()}
    assert outcomes == {
        "test[0.7.0]": "passed",
        "test_fix[0.7.0-none]": "passed",
        "test_fix[0.7.0-hook]": "passed",
        "test_fix[0.7.0-in place]": "failed",
        **{f"test_fix[0.8.0-{delivery}]": "skipped" for delivery in ("none", "hook", "in place")},
    }
    assert found["tests/test_one.py::test_fix[0.7.0-hook]"]["words"] == "words"
    assert found["tests/test_one.py::test_fix[0.8.0-hook]"]["reason"] == "cannot"


def test_outcomes_on_a_main_branch_are_not_recorded(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes on a main branch are not in compatibility.json; `make upstream` records them."""
    monkeypatch.setenv("CKPT_PATCHES_TEST_ALL", "1")
    (project.path / "tests" / "test_one.py").write_text(TESTS.replace('"0.7.0"', '"main"'))
    project.runpytest_subprocess("--rootdir=.", "tests").assert_outcomes(passed=2, failed=1, skipped=3)
    assert {row["version"] for row in rows_of(project.path / "tests/recorded/compatibility.json")} == {"0.8.0"}


def test_outcomes_on_a_checkout_are_recorded_with_its_commit_and_skips_for_want_of_one_are_not(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(upstream.REPOSITORY / "tests"))
    monkeypatch.setenv("CKPT_PATCHES_TEST_ALL", "1")
    test = TESTS.replace("numpy2_product", "remainder_rounding").replace('"0.7.0"', '"0.1"')
    needs_one = test.replace(
        "    record_property", "    import upstream; upstream.tree('apex', '0.1')\n    record_property"
    )
    (project.path / "tests" / "test_one.py").write_text(needs_one)
    project.runpytest_subprocess("--rootdir=.", "tests").assert_outcomes(skipped=6)
    recorded = project.path / "tests" / "recorded"
    assert {row["version"] for row in rows_of(recorded / "compatibility.json")} == {"0.8.0"}
    checkout = project.mkdir("checkout")
    (checkout / "file").write_text("")
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setenv("CKPT_PATCHES_TEST_APEX", str(checkout))
    project.runpytest_subprocess("--rootdir=.", "tests").assert_outcomes(passed=2, failed=1, skipped=3)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    assert {(row["commit"], row["version"]) for row in rows_of(recorded / "checkouts.json")} >= {(commit, "0.1")}


def rows_of(record: Path) -> list[dict[str, str]]:
    return [row for rows in recorded_results.read(record).values() for row in rows]


def test_the_default_run_is_of_the_newest_release_and_three_more_are_of_all_else(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = "".join(f"\n@pytest.mark.{m}\ndef test_{m}():\n    pass\n" for m in ("long", "slow"))
    marked += "\ndef test_any():\n    pass\n"
    (project.path / "tests" / "test_one.py").write_text(TESTS + marked)
    (project.path / "tests" / "test_numpy2_product.py").write_text("def test_own():\n    pass\n")
    default, of_fixes = {"test_any"}, {"test_own", "test_fix[0.8.0-none]", "test_fix[0.8.0-hook]"}
    rest, older = {"test_long"}, {"test_slow", "test_fix[0.7.0-none]", "test_fix[0.7.0-hook]"}
    assert collected(project) == default
    monkeypatch.setenv("CKPT_PATCHES_TEST_FIXES", "1")
    assert collected(project) == of_fixes
    monkeypatch.setenv("CKPT_PATCHES_TEST_REST", "1")
    assert collected(project) == rest
    monkeypatch.setenv("CKPT_PATCHES_TEST_OLDER", "1")
    assert collected(project) == older
    monkeypatch.setenv("CKPT_PATCHES_TEST_ALL", "1")
    assert collected(project) == default | of_fixes | rest | older | {f"test_fix[0.{n}.0-in place]" for n in (7, 8)}


def collected(project: pytest.Pytester) -> set[str]:
    done = project.runpytest_subprocess("--rootdir=.", "--collect-only", "-q", "tests")
    return {line.partition("::")[2] for line in done.outlines if "::" in line}


def test_a_marked_test_without_parameters_is_refused(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_PATCHES_TEST_FIXES", "1")
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
