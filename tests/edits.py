"""What a fix changes in a tree: for tests of the edits themselves, on copies of a few files."""

import ast
import difflib
import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckpt_patches.cli.status import FIXED_UPSTREAM, NOT_PRESENT
from ckpt_patches.engine.fix import load, package_of
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.plan import FixResult, Outcome, TreePlan, module_path, plan_tree
from ckpt_patches.engine.registry import FIXES, TARGETS
from ckpt_patches.engine.source import Source
from upstream import tree


def copy_of(tree: Path, fix: str, to: Path) -> Path:
    """A tree with nothing in it but the files that a fix edits, and the one that says whether it is for the release."""
    for module in {*FIXES[fix], load(fix).concerns or FIXES[fix][0]}:
        source, target = module_path(str(tree), module), module_path(str(to), module)
        if os.path.exists(source):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copyfile(source, target)
    return to


def plan(tree: Path, fix: str, *, for_upstream: bool = False) -> tuple[FixResult, TreePlan]:
    made = plan_tree(str(tree), TARGETS[FIXES[fix][0]], [fix], for_upstream=for_upstream)
    return made.results[0], made


def check_twice_changes_nothing(copy: Path, fix: str) -> None:
    """Check that a fix, which is then written into a copy, finds nothing more to do there."""
    write(plan(copy, fix)[1])
    result, made = plan(copy, fix)
    assert (result.outcome, made.files) == (Outcome.ALREADY_THERE, {})


def check_left_alone(copy: Path, fix: str, module: str, old: str, new: str) -> str:
    """Check that a fix changes no file of a copy once a part of one is other code; the reason that it gives."""
    rewrite(copy, module, old, new)
    result, made = plan(copy, fix)
    assert (result.outcome, made.files) == (Outcome.NO_MATCH, {})
    return result.reason


def check_in_any_order(root: Path, names: Sequence[str], to: Path) -> None:
    """Check that fixes, written one after the other into copies of a tree, make the same text in each of their orders.

    All of them have something to do there.
    """
    texts = []
    for number, order in enumerate(itertools.permutations(names)):
        copy = to / str(number)
        for name in names:
            copy_of(root, name, copy)
        for name in order:
            result, made = plan(copy, name)
            assert result.outcome is Outcome.APPLIES, (order, result)
            write(made)
        assert [plan(copy, name)[0].outcome for name in names] == [Outcome.ALREADY_THERE] * len(names)
        texts.append({module: text(copy, module) for name in names for module in FIXES[name] if has(copy, module)})
    assert all(other == texts[0] for other in texts[1:])


def check_not_needed(tree: Path, fix: str) -> str:
    """Check that a fix changes nothing in a tree, without a complaint; the words for the compatibility page."""
    result, made = plan(tree, fix)
    words = {Outcome.ALREADY_THERE: FIXED_UPSTREAM, Outcome.NOT_PRESENT: NOT_PRESENT}
    assert result.outcome in words, result
    assert made.files == {}
    return words[result.outcome]


def check_not_present(version: str, fix: str, record_property: Callable[[str, object], None]) -> None:
    """Check that a release has nothing for a fix to edit, and record it for the compatibility page."""
    _check_words(version, fix, NOT_PRESENT, record_property)


def check_fixed_upstream(version: str, fix: str, record_property: Callable[[str, object], None]) -> None:
    """Check that a release has what a fix brings, and record it for the compatibility page."""
    _check_words(version, fix, FIXED_UPSTREAM, record_property)


def _check_words(version: str, fix: str, expected: str, record_property: Callable[[str, object], None]) -> None:
    words = check_not_needed(tree(DISTRIBUTIONS[package_of(fix)], version), fix)
    assert words == expected
    record_property("compat", words)


def check_added(version: str, fix: str, expected: dict[str, list[str]]) -> None:
    """Check that a fix applies to a release, and which lines it adds, by the file's name."""
    result, made = plan(tree(DISTRIBUTIONS[package_of(fix)], version), fix)
    assert result.outcome is Outcome.APPLIES
    assert added_lines(made) == expected


def added_lines(made: TreePlan) -> dict[str, list[str]]:
    """By the file's name, the lines that we bring: ours to repeat in a test, as upstream's are not."""
    added = {}
    for module, file in made.files.items():
        before, after = file.original.decode().splitlines(), file.patched.decode().splitlines()
        lines = difflib.unified_diff(before, after, n=0, lineterm="")
        added[module.rpartition(".")[2]] = [
            line[1:].strip() for line in lines if line.startswith("+") and line[:3] != "+++"
        ]
    return added


def definition(root: Path, module: str, *functions: Callable[..., Any], indent: int = 0) -> list[str]:
    """The lines that functions of a fix's file have in an upstream module, so far in; no empty ones."""
    path = Path(module_path(str(root), module))
    source = Source(path.read_bytes(), str(path))
    texts = [source.definition(function, indent) for function in functions]
    return [line.strip() for text in texts for line in text.splitlines() if line.strip()]


def write(made: TreePlan) -> None:
    for file in made.files.values():
        Path(file.path).write_bytes(file.patched)


def rewrite(tree: Path, module: str, old: str, new: str) -> None:
    """Change a file of a copied tree; `old` is there."""
    path = Path(module_path(str(tree), module))
    text = path.read_text()
    assert old in text, f"expected {old!r} in {path}"
    path.write_text(text.replace(old, new))


def text(tree: Path, module: str) -> str:
    """A module's source in a tree."""
    return Path(module_path(str(tree), module)).read_text()


def has(tree: Path, module: str) -> bool:
    return Path(module_path(str(tree), module)).exists()


def is_same_code(text: bytes, other: bytes) -> bool:
    """Whether two sources differ in comments and layout at the most; one of them may be broken."""
    try:
        return ast.dump(ast.parse(text)) == ast.dump(ast.parse(other))
    except SyntaxError:
        return False
