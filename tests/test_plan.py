"""What a fix does in a tree: all of its edits or none, decided by structure, for all of its modules at once."""

from pathlib import Path

import pytest

from ckpt_patches import plan
from ckpt_patches.fix import Fix
from ckpt_patches.plan import Outcome, TreePlan, plan_tree
from ckpt_patches.registry import CORE
from ckpt_patches.source import AlreadyThere, NotConcerned, Source

FIRST, SECOND = "megatron.core.first", "megatron.core.second"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "megatron/core").mkdir(parents=True)
    for module in (FIRST, SECOND):
        tmp_path.joinpath(*module.split(".")).with_suffix(".py").write_text("value = old(1)\n")
    return tmp_path


def rename(source: Source) -> None:
    if source.all("new(1)"):
        raise AlreadyThere
    source.replace(source.one("old(1)"), "new(1)")


def make(name: str = "fix", *, concerns: str = "", optional: bool = False) -> Fix:
    fix = Fix(name, upstream=(), affected="", test="", concerns=concerns)
    fix.edit(FIRST)(rename)
    fix.edit(SECOND, optional=optional)(rename)
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


def test_one_unknown_module_leaves_both_alone(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "megatron/core/second.py").write_text("value = other(1)\n")
    found, reason, files = outcome(tree, monkeypatch, make())
    assert (found, files) == (Outcome.NO_MATCH, [])
    assert "second.py: expected `old(1)` once, found it 0 times" in reason


def test_half_there_is_completed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream took one half of it, or an in-place change of two files was interrupted."""
    (tree / "megatron/core/first.py").write_text("value = new(1)\n")
    assert outcome(tree, monkeypatch, make()) == (Outcome.APPLIES, "", [SECOND])


def test_a_missing_module_is_unknown_code_unless_it_is_optional(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "megatron/core/second.py").unlink()
    found, reason, files = outcome(tree, monkeypatch, make())
    assert (found, files) == (Outcome.NO_MATCH, [])
    assert "second.py: there is no such file" in reason
    assert outcome(tree, monkeypatch, make(optional=True)) == (Outcome.APPLIES, "", [FIRST])


def test_without_any_of_its_modules_a_fix_is_not_present(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        (tree / f"megatron/core/{name}.py").unlink()
    assert outcome(tree, monkeypatch, make()) == (Outcome.NOT_PRESENT, "", [])


def test_without_the_module_that_it_concerns_a_fix_is_not_present(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "megatron/core/second.py").unlink()
    assert outcome(tree, monkeypatch, make(concerns=SECOND)) == (Outcome.NOT_PRESENT, "", [])


def test_a_release_that_does_not_have_the_code_is_not_concerned(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_here(source: Source) -> None:
        raise NotConcerned

    fix = Fix("fix", upstream=(), affected="", test="")
    fix.edit(FIRST)(not_here)
    assert outcome(tree, monkeypatch, fix) == (Outcome.NOT_PRESENT, "", [])


def test_an_edit_that_does_not_compile_is_not_made(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fix = Fix("fix", upstream=(), affected="", test="")
    fix.edit(FIRST)(lambda source: source.replace(source.one("old(1)"), "new(1"))
    found, reason, files = outcome(tree, monkeypatch, fix)
    assert (found, files) == (Outcome.NO_MATCH, [])
    assert "first.py: the edited source does not compile" in reason


def test_of_two_fixes_to_one_place_the_first_wins(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(tree, monkeypatch, make("one"), make("two"))
    assert [result.outcome for result in made.results] == [Outcome.APPLIES, Outcome.NO_MATCH]
    assert "another fix edits the same place" in made.results[1].reason
    assert sorted(made.files) == [FIRST, SECOND]


def test_bytecode_alone_has_no_source(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tree / "megatron/core/first.py"
    path.rename(path.with_suffix(".pyc"))
    found, reason, _ = outcome(tree, monkeypatch, make())
    assert found is Outcome.NO_MATCH
    assert "no source, only bytecode" in reason
