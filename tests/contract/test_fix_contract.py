"""The contract of every fix. Fixes are discovered: a new fix needs no entry here.

What one fix does is in its proof, tests/fixes/test_NAME.py.
"""

import ast
import re
import runpy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyflakes.checker import Checker
from pyflakes.messages import UnusedImport

import edits
from ckpt_patches import PREFIXES
from ckpt_patches.engine import fix as fixes
from ckpt_patches.engine import plan
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.plan import Outcome, plan_tree
from ckpt_patches.engine.registry import CORE, DEEPSPEED, PACKAGES, folder
from ckpt_patches.engine.releases import have_code
from ckpt_patches.engine.source import Source
from ckpt_patches.inplace import rewrite
from registered import EVERYTHING, FIXES, SWITCHED, TARGETS
from upstream import (
    DELIVERIES,
    OLDEST_REPORTED,
    REPOSITORY,
    in_place,
    newest,
    newest_affected,
    numbers,
    releases,
    runnable,
    tree,
)

NAMES = list(FIXES)
COMMON = (CORE, DEEPSPEED)  # with more than one fix
FLOOR = {CORE: "0.12.0", DEEPSPEED: "0.15.0"}  # the oldest supported releases


def forms() -> Iterator[Any]:
    """Each fix on the oldest and on the newest release that has its bug and can run here."""
    for name in NAMES:
        newest_with_it = newest_affected(name)[1]
        package, floor = fixes.package_of(name), FLOOR.get(fixes.package_of(name), "0")
        supported = [v for v in runnable(DISTRIBUTIONS[package]) if numbers(v) >= numbers(floor)]
        with_it = [version for version in supported if fixes.load(name).affects(version)]
        for version in dict.fromkeys([*with_it[-1:], newest_with_it]):
            yield pytest.param(name, version, id=f"{name}-{version}")


FORMS = list(forms())
DELIVERED = [form for form in FORMS if not edits.is_for_upstream_alone(form.values[0])]


def tree_for(fix: str, version: str) -> Path:
    return tree(DISTRIBUTIONS[fixes.package_of(fix)], version)


# Files


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_fix_is_found_by_its_name_and_edits_one_package(name: str) -> None:
    """It imports only the engine: it loads fast in a training process, and `status` imports no torch."""
    fix, text = fixes.load(name), Path(fixes.path_of(name)).read_text()
    assert fix.name == name
    assert {TARGETS[module] for module in EVERYTHING[name]} == {fix.package}
    assert all(module.startswith(PREFIXES) for module in EVERYTHING[name])  # which the import hook checks first
    assert name in (SWITCHED[fix.switch] if fix.switch else FIXES)
    assert all(NAMES.index(other) < NAMES.index(name) for other in fix.depends_on)
    body = ast.parse(text).body
    modules = [node.module for node in body if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    assert {str(module).split(".")[0] for module in modules} <= {"ckpt_patches", "collections", "typing", "ast"}


@pytest.mark.parametrize("name", NAMES)
def test_a_fix_states_what_the_commands_print_and_has_its_page(name: str) -> None:
    """Commands print the first line of the file and the symptom, and look up the releases.

    What the newest release does not need, or is ours alone, is not sent: no test for upstream, and no commit message.
    """
    fix, text = fixes.load(name), Path(fixes.path_of(name)).read_text()
    assert fixes.sentence(name).endswith(".")
    assert fix.symptom
    ends = [end for first_and_last in fix.releases for end in first_and_last]
    assert ends == sorted(ends, key=fixes.numbers)
    assert ends
    assert set(ends) <= {*PACKAGES[fix.package].releases, OLDEST_REPORTED}
    says_why = re.search("(?m)^More than 150 lines: .{30,}$", text) is not None
    assert says_why == (len(text.splitlines()) > 150)
    tests = Path(folder(fix.package)) / "upstream_tests"
    is_sent = fix.affects(PACKAGES[fix.package].releases[-1]) and not all(edit.ours_alone for edit in fix.edits)
    assert (tests / f"test_{name}.py").exists() is bool(fix.test) is is_sent
    assert not fix.test or (tests / Path(fix.test).name).exists()
    page = (REPOSITORY / "docs" / "fixes" / f"{name}.md").read_text()
    assert ("\n## Change: " in page) is is_sent


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_a_fix_has_a_proof_without_it_and_with_it(name: str) -> None:
    """On the newest release with the bug, too."""
    items = collected(REPOSITORY / "tests" / "fixes" / f"test_{name}.py")
    last = newest_affected(name)[1]
    for deliveries in (["none"], list(DELIVERIES)):
        releases_of = [releases_ for releases_, kinds in items if kinds == deliveries]
        assert any(last in versions for versions in releases_of), (deliveries, last)


def collected(file: Path) -> list[tuple[list[str], list[str]]]:
    """The releases and the deliveries of each test of a proof that has both."""
    found = []
    for test in (value for name, value in runpy.run_path(str(file)).items() if name.startswith("test_")):
        marks = {mark.args[0]: mark.args[1] for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"}
        if {"version", "delivery"} <= marks.keys():
            found.append(([getattr(one, "values", (one,))[0] for one in marks["version"]], [*marks["delivery"]]))
    return found


# Behavior


ON_RELEASES = [
    pytest.param(name, *one.values, id=f"{name}-{one.id}")
    for name in NAMES
    for one in releases(DISTRIBUTIONS[fixes.package_of(name)])
]


@pytest.mark.parametrize(("name", "version"), ON_RELEASES)
def test_a_fix_applies_where_the_bug_is_and_changes_nothing_elsewhere(name: str, version: str) -> None:
    """A fix applies to each release with the bug, and changes no other release."""
    result, made = edits.plan(tree_for(name, version), name)
    affected = fixes.load(name).affects(version)
    assert result.outcome is (Outcome.APPLIES if affected else Outcome.NOT_NEEDED), result
    assert affected or made.files == {}


# Code that moves. In a release of its range, a fix that no longer finds its code must say so.


def in_the_newest() -> list[Any]:
    """The fixes of bugs that the newest release of their package still has."""
    found = [(name, newest(DISTRIBUTIONS[fixes.package_of(name)])) for name in NAMES]
    return [pytest.param(*one, id=one[0]) for one in found if fixes.load(one[0]).affects(one[1])]


@pytest.mark.parametrize(("name", "version"), in_the_newest())
def test_a_moved_file_or_a_renamed_function_is_no_match_in_two_lines(
    name: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each file of the release, and each function and class that the fix looks for by name."""
    copy = edits.copy_of(tree_for(name, version), name, tmp_path)
    fix, package = fixes.load(name), fixes.package_of(name)
    for edit in (edit for edit in fix.edits if is_of(edit, fix, version)):
        path = Path(plan.module_path(str(copy), edit.module))
        text = path.read_text()
        source = Source(path.read_bytes(), str(path), lambda ranges: have_code(ranges, package, version))
        for wanted in sorted(looked_for(edit, source, monkeypatch)):
            last = wanted.rpartition(".")[2]
            path.write_text(re.sub(rf"\b{last}\b", f"renamed_{last}", text))
            result, made = edits.plan(copy, name)
            brought = f"def {last}("
            if edit.module in made.files and brought in made.files[edit.module].patched.decode():
                continue  # upstream has it in some releases, and the fix brings it to the others
            check_no_match(result, copy)
        path.unlink()
        check_no_match(edits.plan(copy, name)[0], copy)
        path.write_text(text)


def check_no_match(result: plan.FixResult, root: Path) -> None:
    assert result.outcome is Outcome.NO_MATCH, result
    assert len(result.reason.replace(f"{root}/", "")) <= 2 * 160, result.reason
    assert "\n" not in result.reason


def looked_for(edit: fixes.Edit, in_source: Source, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The functions and classes of a file that an edit finds by name."""
    found: set[str] = set()
    with monkeypatch.context() as patched:
        for method in ("function", "class_named", "insert_function_before"):
            original = getattr(Source, method)

            def noted(source: Source, wanted: Any, *more: Any, original: Any = original) -> Any:
                there = original(source, wanted, *more)
                found.update([wanted] if isinstance(wanted, str) else [])
                return there

            patched.setattr(Source, method, noted)
        in_source.request(edit.function)
    return found


def is_of(edit: fixes.Edit, fix: fixes.Fix, version: str) -> bool:
    """Whether the release has an edit's code, and the edit is made here."""
    is_made = fix.is_for_upstream_alone or not edit.upstream_alone
    return is_made and have_code(edit.releases or fix.releases, fix.package, version)


# Edits


@pytest.mark.parametrize(("name", "version"), FORMS)
def test_pyflakes_finds_nothing_new_in_an_edited_file(name: str, version: str) -> None:
    """Above all no undefined name: the edited module compiles, and would fail when it runs."""
    for module, file in edits.plan(tree_for(name, version), name)[1].files.items():
        assert complaints(file.patched) <= complaints(file.original), module


def complaints(text: bytes) -> set[str]:
    """The messages of pyflakes, without line numbers.

    An import that the edits leave unused is harmless; in the newest release, test_upstream_style.py finds it.
    """
    messages = (one for one in Checker(ast.parse(text)).messages if not isinstance(one, UnusedImport))
    return {re.sub(r"line \d+", "line", one.message % one.message_args) for one in messages}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "version"), FORMS)
def test_a_fork_with_a_part_of_a_fix_is_completed_or_left_alone(name: str, version: str, tmp_path: Path) -> None:
    """A tree that lacks one edit of a fix is completed or is a mismatch, never taken for a fixed release."""
    package = fixes.package_of(name)
    copy = edits.copy_of(tree_for(name, version), name, tmp_path)
    planned = plan._Tree(str(copy), package, {}, for_upstream=edits.is_for_upstream_alone(name))
    assert plan._try(name, planned).outcome is Outcome.APPLIES
    sources = {module: source for module, source in planned.sources.items() if source and source.edits}
    whole = {module: source.edited() for module, source in sources.items()}
    edits.write(edits.plan(copy, name)[1])
    for module, source in sources.items():
        wanted = list(source.edits)
        for left_out in wanted:
            source.edits = [edit for edit in wanted if edit is not left_out]
            if edits.is_same_code(source.edited(), whole[module]):
                continue  # it changes a comment only
            Path(source.path).write_bytes(source.edited())
            result, made = edits.plan(tmp_path, name)
            completed = result.outcome is Outcome.APPLIES and made.files[module].patched == whole[module]
            assert completed or result.outcome is Outcome.NO_MATCH, (left_out, result)
        Path(source.path).write_bytes(whole[module])


@pytest.mark.parametrize(("name", "version"), DELIVERED)
def test_apply_is_idempotent_and_revert_restores_every_byte(name: str, version: str, tmp_path: Path) -> None:
    package = fixes.package_of(name)
    copy = edits.copy_of(tree_for(name, version), name, tmp_path)
    before = contents(copy)
    assert rewrite.apply(str(copy), package, [name]).named(Outcome.APPLIES) == [name]
    applied = contents(copy)
    assert applied.keys() > before.keys()  # the originals are backed up
    result, made = edits.plan(copy, name)
    assert (result.outcome, made.files) == (Outcome.NOT_NEEDED, {})
    rewrite.apply(str(copy), package, [name])
    assert contents(copy) == applied
    assert rewrite.revert(str(copy), package, [name]) == [name]
    assert contents(copy) == before


@pytest.mark.parametrize(("name", "version"), in_the_newest())
def test_a_tree_with_the_patch_for_upstream_is_no_mismatch(name: str, version: str, tmp_path: Path) -> None:
    """What is only for upstream is not delivered: neither the hook nor `apply` makes it."""
    package, copy = fixes.package_of(name), edits.copy_of(tree_for(name, version), name, tmp_path)
    if edits.is_for_upstream_alone(name):
        assert not plan_tree(str(copy), package, [name]).files
        assert rewrite.apply(str(copy), package, [name]).files == {}
    edits.write(edits.plan(copy, name, for_upstream=True)[1])
    assert edits.plan(copy, name)[0].outcome is not Outcome.NO_MATCH
    assert edits.plan(copy, name, for_upstream=True)[0].outcome is Outcome.NOT_NEEDED


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Together with the other fixes of its package


def companies(packages: Iterable[str] = COMMON) -> list[Any]:
    """Each release that is the newest with some fix's bug."""
    found = {(fixes.package_of(name), newest_affected(name)[1]): None for name in NAMES}
    known = [(package, version) for package in packages for version in PACKAGES[package].releases]
    return [pytest.param(*one, id="-".join(one)) for one in known if one in found]


@pytest.mark.parametrize(("package", "version"), companies())
def test_the_order_of_the_fixes_does_not_matter(package: str, version: str, tmp_path: Path) -> None:
    """Fixes written one by one, in order and in reverse order, and all at once result in the same lines.

    Lines that two fixes insert at the same place are in the order of writing.
    """
    root = tree(DISTRIBUTIONS[package], version)
    at_once = plan_tree(str(root), package)
    applied = at_once.named(Outcome.APPLIES)
    assert len(applied) > 1
    for number, order in enumerate((applied, applied[::-1])):
        copy = tmp_path / str(number)
        for name in order:
            edits.copy_of(root, name, copy)
        for name in order:
            result, made = edits.plan(copy, name)
            assert result.outcome is Outcome.APPLIES, (order, result)
            edits.write(made)
        for module, file in at_once.files.items():
            assert sorted(edits.text(copy, module).splitlines()) == sorted(file.patched.decode().splitlines())
        again = plan_tree(str(copy), package, applied)
        assert (again.files, again.named(Outcome.NOT_NEEDED)) == ({}, applied)


@pytest.mark.parametrize(("package", "version"), companies(PACKAGES))
def test_what_is_written_in_place_is_what_the_hook_runs(package: str, version: str) -> None:
    """In every module, the in-place text equals the hook's, so most behavior tests need only one delivery."""
    root = tree(DISTRIBUTIONS[package], version)
    made, written = plan_tree(str(root), package), str(in_place(root))
    assert {module: Path(plan.module_path(written, module)).read_bytes() for module in made.files} == {
        module: file.patched for module, file in made.files.items()
    }
