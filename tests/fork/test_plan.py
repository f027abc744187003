"""A fix in a tree: all of its edits or none, in all of its modules, decided by code structure."""

import gc
import threading
import warnings
from pathlib import Path

import pytest

from ckpt_patches.engine import plan
from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.plan import Outcome, TreePlan, plan_tree
from ckpt_patches.engine.registry import CORE
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NotNeeded, Ranges, Source
from ckpt_patches.runtime.pause import without_syntax_warnings

WITH_BUG: Ranges = (("0.12.0", newest("megatron-core")),)
OTHERS: Ranges = (("0.12.0", "0.12.3"),)
FIRST, SECOND = "megatron.core.first", "megatron.core.second"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "megatron/core").mkdir(parents=True)
    for module in (FIRST, SECOND):
        tmp_path.joinpath(*module.split(".")).with_suffix(".py").write_text(
            "from here import new, old\nvalue = old(1)\n"
        )
    return tmp_path


def rename(source: Source) -> None:
    if source.all("new(1)"):
        raise NotNeeded
    source.replace(source.one("old(1)"), "new(1)")


def make(name: str = "fix", *, releases: Ranges = WITH_BUG, of_second: Ranges = ()) -> Fix:
    fix = Fix(name, releases=releases)
    fix.edit(FIRST)(rename)
    fix.edit(SECOND, releases=of_second)(rename)
    return fix


def planned(root: Path, monkeypatch: pytest.MonkeyPatch, *fixes: Fix) -> TreePlan:
    table = {fix.name: fix for fix in fixes}
    monkeypatch.setattr(plan, "load", table.__getitem__)
    return plan_tree(str(root), CORE, list(table))


def outcome(root: Path, monkeypatch: pytest.MonkeyPatch, fix: Fix) -> tuple[Outcome, str, list[str]]:
    made = planned(root, monkeypatch, fix)
    return made.results[0].outcome, made.results[0].reason, sorted(made.files)


def test_both_modules_are_edited(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(tree, monkeypatch, make()) == (Outcome.APPLIES, "", [FIRST, SECOND])


def test_an_invalid_escape_of_upstreams_is_no_warning_and_no_error(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invalid escapes stay silent: apex has one in a docstring, and since Python 3.12 each process would warn twice."""
    path = tree.joinpath(*FIRST.split(".")).with_suffix(".py")
    path.write_text(f'"""A \\: in it."""\n{path.read_text()}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert outcome(tree, monkeypatch, make()) == (Outcome.APPLIES, "", [FIRST, SECOND])
        with pytest.raises(SyntaxError):
            compile(path.read_text(), "", "exec")


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_looked_for_meanwhile_and_after_it_as_before(
    enabled: bool, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning turns garbage collection off and restores it, even after an unexpected exception."""
    during: list[bool] = []

    def look(source: Source) -> None:
        during.append(gc.isenabled())
        raise KeyboardInterrupt

    fix = Fix("looks", upstream=(), test="")
    fix.edit(FIRST)(look)
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyboardInterrupt):
            planned(tree, monkeypatch, fix)
        planned(tree, monkeypatch, make())
        assert (during, gc.isenabled()) == ([False], enabled)
    finally:
        (gc.enable if was else gc.disable)()


def test_the_edited_functions_are_known_by_name(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the functions without a name: two of them may be on one line."""
    path = tree / "megatron/core/first.py"
    box = "class Box:\n    @staticmethod\n    def get():\n        x = [lambda: 1]\n        return old(1)\n"
    path.write_text(f"a, b = (lambda: 1), (lambda: 2)\nc = {{old for old in a}}, {{old for old in b}}\n\n\n{box}")
    made = planned(tree, monkeypatch, make())
    assert made.files[FIRST].functions == {"Box.get": ("fix",)}


def test_one_unknown_module_leaves_both_alone(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "megatron/core/second.py").write_text("value = older(1)\n")
    found, reason, files = outcome(tree, monkeypatch, make())
    assert (found, files) == (Outcome.NO_MATCH, [])
    assert "second.py: expected `old(1)` once, found it 0 times; most like it is line 1: `value = older(1)`" in reason


def test_half_there_is_unknown_code_that_says_what_is_missing(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partly present edits are unknown code, and the missing part is named, as in a fork with half of the fix."""
    (tree / "megatron/core/first.py").write_text("value = new(1)\n")
    found, reason, files = outcome(tree, monkeypatch, make())
    assert (found, files) == (Outcome.NO_MATCH, [])
    assert f"a part of this fix is there already (rename in {FIRST}), missing: rename in {SECOND}" in reason


def test_edits_that_are_right_alone_complete_each_other(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each independent edit applies alone: some releases already have one of them."""
    (tree / "megatron/core/first.py").write_text("value = new(1)\n")
    fix = Fix("fix", releases=WITH_BUG)
    fix.edit(FIRST, SECOND, independent=True)(rename)
    assert outcome(tree, monkeypatch, fix) == (Outcome.APPLIES, "", [SECOND])


def test_absent_code_is_a_mismatch_in_the_stated_releases_alone(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        (tree / f"megatron/core/{name}.py").unlink()
    found, reason, _ = outcome(tree, monkeypatch, make())
    assert found is Outcome.NO_MATCH
    assert "first.py: there is no such file" in reason
    assert outcome(tree, monkeypatch, make(releases=OTHERS)) == (Outcome.NOT_NEEDED, "", [])


def test_an_edit_of_some_releases_may_be_absent_in_others(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "megatron/core/second.py").unlink()
    assert outcome(tree, monkeypatch, make())[0] is Outcome.NO_MATCH
    assert outcome(tree, monkeypatch, make(releases=OTHERS)) == (Outcome.NOT_NEEDED, "", [])
    assert outcome(tree, monkeypatch, make(of_second=OTHERS)) == (Outcome.APPLIES, "", [FIRST])


def test_an_edit_that_looks_says_whether_the_fix_is_for_this_code(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(source: Source) -> None:
        source.one("other(1)")

    fix = make(releases=OTHERS)
    fix.edit(SECOND)(look)
    assert outcome(tree, monkeypatch, fix) == (Outcome.NOT_NEEDED, "", [])
    (tree / "megatron/core/second.py").write_text("value = old(1)\nother(1)\n")
    assert outcome(tree, monkeypatch, fix) == (Outcome.APPLIES, "", [FIRST, SECOND])


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("0.13.0", Outcome.NO_MATCH),
        ("0.12.0", Outcome.NOT_NEEDED),
        ("0.14.0", Outcome.NOT_NEEDED),
        ("0.13.0rc1", Outcome.NOT_NEEDED),  # can be as 0.12.3
        ("0.13.1rc1", Outcome.NO_MATCH),
        ("0.13.1+local", Outcome.NOT_NEEDED),  # can be as 0.14.0
        ("0.13.0+26", Outcome.NO_MATCH),
        ("99.0.0", Outcome.NOT_NEEDED),
    ],
)
def test_a_version_between_two_releases_counts_as_both(
    tree: Path, monkeypatch: pytest.MonkeyPatch, version: str, found: Outcome
) -> None:
    (tree / "megatron/core/second.py").unlink()
    monkeypatch.setattr(plan, "version_in", lambda root, package: version)
    assert outcome(tree, monkeypatch, make(releases=(("0.13.0", "0.13.1"),)))[0] is found


@pytest.mark.parametrize("version", ["99.0.0", "99.0.0.dev3", f"{newest('megatron-core')}+7", "?"])
def test_a_range_up_to_the_newest_release_is_open(tree: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    (tree / "megatron/core/second.py").unlink()
    monkeypatch.setattr(plan, "version_in", lambda root, package: version)
    assert outcome(tree, monkeypatch, make())[0] is Outcome.NO_MATCH


def test_half_an_edit_of_another_release_is_left_out(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is right alone: it has changed something before it misses its next anchor."""

    def two(source: Source) -> None:
        source.replace(source.one("old(1)"), "half(1)")
        source.one("gone(1)")

    fix = Fix("fix", releases=OTHERS)
    fix.edit(FIRST, independent=True, releases=OTHERS)(two)
    assert outcome(tree, monkeypatch, fix) == (Outcome.NOT_NEEDED, "", [])
    fix.edit(SECOND, releases=WITH_BUG)(rename)
    assert outcome(tree, monkeypatch, fix) == (Outcome.APPLIES, "", [SECOND])


def bad(text: str, name: str = "bad") -> Fix:
    """A fix for both modules; its edit of the second module is bad."""
    fix = Fix(name, releases=WITH_BUG)
    fix.edit(FIRST)(lambda source: source.insert_after(source.one("value = ..."), "other = 1"))
    fix.edit(SECOND)(lambda source: source.insert_after(source.one("value = ..."), text))
    return fix


def test_a_bad_edit_takes_its_own_fix_away_and_no_other(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(tree, monkeypatch, make("one"), bad("new(1"), bad("third = 3", "good"))
    assert [r.outcome for r in made.results] == [Outcome.APPLIES, Outcome.NO_MATCH, Outcome.APPLIES]
    assert "second.py: the edited source does not compile" in made.results[1].reason
    assert {m: file.fixes for m, file in made.files.items()} == {FIRST: ("one", "good"), SECOND: ("one", "good")}
    assert made.files[SECOND].patched == b"from here import new, old\nvalue = new(1)\nthird = 3\n"


def test_a_definition_that_is_text_of_a_string_is_none(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quotes in front of it look as if the string had ended: the compiled module does not have the function."""
    path = tree / "megatron/core/first.py"
    string = 'a = \'"""\', """\nclass Box:\n    def get(self):\n        pass\n"""\n'
    path.write_text(path.read_text() + string)
    fix = Fix("fix", releases=WITH_BUG)
    fix.edit(FIRST)(lambda source: source.insert_at_start(source.function("Box.get"), "begin()"))
    made = planned(tree, monkeypatch, fix, make("other"))
    assert "first.py: expected one definition of Box.get, found 0" in made.results[0].reason
    assert [result.outcome for result in made.results] == [Outcome.NO_MATCH, Outcome.APPLIES]


def test_a_fix_that_fails_takes_no_other_one_away(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: Source) -> None:
        source.replace(source.one("old(1)"), "half(1)")
        raise IndexError("a defect")

    fix = Fix("fails", upstream=(), test="")
    fix.edit(FIRST)(fails)
    made = planned(tree, monkeypatch, fix, make("one"))
    assert [r.outcome for r in made.results] == [Outcome.NO_MATCH, Outcome.APPLIES]
    assert made.results[0].reason == "the fix itself failed: IndexError: a defect"
    assert made.files[FIRST].patched == b"from here import new, old\nvalue = new(1)\n"


def test_of_two_fixes_to_one_place_the_first_wins(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(tree, monkeypatch, make("one"), make("two"))
    assert [result.outcome for result in made.results] == [Outcome.APPLIES, Outcome.NO_MATCH]
    assert "another fix edits the same place" in made.results[1].reason
    assert sorted(made.files) == [FIRST, SECOND]


def test_of_a_module_without_source_every_fix_is_told(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module without source is reported for every fix, not only the first."""
    second = tree / "megatron/core/second.py"
    second.rename(f"{second}c")
    results = planned(tree, monkeypatch, make("one"), make("two")).results
    assert [result.outcome for result in results] == [Outcome.NO_MATCH, Outcome.NO_MATCH]
    assert all("no source, only bytecode" in result.reason for result in results)


@pytest.mark.parametrize(("mark", "expected"), [("ours_alone", [True, False]), ("upstream_alone", [False, True])])
def test_an_edit_may_be_ours_or_upstreams_alone(
    mark: str, expected: list[bool], tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An `ours_alone` edit is applied here and left out of a diff for upstream; `upstream_alone` is the reverse."""

    def log(source: Source) -> None:
        source.insert_before(source.one("value = ..."), "print('ours')")

    fix = make("one")
    fix.edit(FIRST, independent=True, **{mark: True})(log)  # type: ignore[arg-type]
    monkeypatch.setattr(plan, "load", {"one": fix}.__getitem__)
    ours, theirs = (plan_tree(str(tree), CORE, ["one"], for_upstream=choice) for choice in (False, True))
    assert [b"print" in made.files[FIRST].patched for made in (ours, theirs)] == expected
    assert [b"new(1)" in made.files[FIRST].patched for made in (ours, theirs)] == [True, True]


def test_a_pause_of_warnings_is_that_of_one_thread() -> None:
    """A filter that another thread adds meanwhile stays, and what that thread compiles is not silenced."""
    before, odd, seen = list(warnings.filters), r"'\d'", list[bool]()

    def other() -> None:
        warnings.filterwarnings("error", message="invalid escape")
        with pytest.raises(SyntaxError):
            compile(odd, "other.py", "exec")
        seen.append(True)

    with warnings.catch_warnings():
        with without_syntax_warnings():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        assert seen == [True]
        assert list(warnings.filters)[1:] == before
        with without_syntax_warnings():
            compile(odd, "ours.py", "exec")
        with pytest.raises(SyntaxError):
            compile(odd, "ours.py", "exec")
    assert list(warnings.filters) == before
