"""What holds for every fix: its file, its place in the registry, its page, its test, its line in the change log."""

import ast
import importlib
import textwrap
from pathlib import Path

import pytest

import edits
from ckpt_patches import fix as fixes
from ckpt_patches.plan import Outcome, fixes_for, plan_tree
from ckpt_patches.registry import CORE, DEEPSPEED, FIXES, FOLDERS, TARGETS
from ckpt_patches.source import function_text
from ckpt_patches.startup import PREFIXES
from upstream import REPOSITORY, releases, tree

NAMES = list(FIXES)


@pytest.mark.parametrize("name", NAMES)
def test_the_registry_and_the_fix_name_the_same_modules(name: str) -> None:
    fix = fixes.load(name)
    assert fix.name == name
    assert {edit.module for edit in fix.edits} | ({fix.concerns} - {""}) == set(FIXES[name])
    assert {TARGETS[module] for module in FIXES[name]} == {fix.package}
    assert all(module.startswith(PREFIXES) for module in FIXES[name])  # what the import hook looks at first


@pytest.mark.parametrize("name", NAMES)
def test_a_fix_has_its_file_page_tests_and_change_log_line(name: str) -> None:
    fix = fixes.load(name)
    folder = REPOSITORY / FOLDERS[fix.package]
    assert (folder / f"{name}.py").exists()
    assert (folder / "upstream_tests" / Path(fix.test).name).exists()
    assert (REPOSITORY / "docs" / f"{name}.md").exists()
    assert (REPOSITORY / "tests" / f"test_{name}.py").exists()
    assert f"`{name}`" in (REPOSITORY / "CHANGELOG.md").read_text()
    assert f"`{name}`" in (REPOSITORY / "README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_is_one_sentence_and_an_upstream_link(name: str) -> None:
    text = (Path(fixes.folder(fixes.package_of(name))) / f"{name}.py").read_text()
    sentence, blank, link = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    assert sentence.endswith(".")
    assert blank == ""
    assert link.startswith("https://github.com/")
    assert link in fixes.load(name).upstream


def test_every_file_of_a_fix_is_in_the_registry() -> None:
    files = {path.stem for folder in FOLDERS.values() for path in (REPOSITORY / folder).glob("*.py")}
    assert files - {"__init__"} == set(FIXES)


@pytest.mark.parametrize("version", releases("megatron-core"))
def test_no_fix_is_without_a_match_on_a_megatron_core_release(version: str) -> None:
    assert plan_tree(str(tree("megatron-core", version)), CORE).named(Outcome.NO_MATCH) == []


@pytest.mark.parametrize("version", releases("deepspeed"))
def test_no_fix_is_without_a_match_on_a_deepspeed_release(version: str) -> None:
    assert plan_tree(str(tree("deepspeed", version)), DEEPSPEED).named(Outcome.NO_MATCH) == []


@pytest.mark.parametrize("version", releases("megatron-core"))
def test_applied_twice_to_megatron_core_changes_nothing(version: str, tmp_path: Path) -> None:
    apply_twice(tree("megatron-core", version), CORE, tmp_path)


@pytest.mark.parametrize("version", releases("deepspeed"))
def test_applied_twice_to_deepspeed_changes_nothing(version: str, tmp_path: Path) -> None:
    apply_twice(tree("deepspeed", version), DEEPSPEED, tmp_path)


def apply_twice(root: Path, package: str, copy: Path) -> None:
    """All fixes together, on a copy of the files that they edit: none finds anything to do the second time."""
    for name in fixes_for(package):
        edits.copy_of(root, name, copy)
    made = plan_tree(str(copy), package)
    applied = made.named(Outcome.APPLIES)
    assert applied
    edits.write(made)
    again = plan_tree(str(copy), package)
    assert (again.files, again.named(Outcome.APPLIES), again.named(Outcome.NO_MATCH)) == ({}, [], [])
    assert set(applied) <= set(again.named(Outcome.ALREADY_THERE))


@pytest.mark.parametrize("name", NAMES)
def test_the_text_of_a_function_is_all_of_it(name: str) -> None:
    """What gets inserted is found by its indentation; here by the parser."""
    module = importlib.import_module(f"{FOLDERS[fixes.package_of(name)].replace('/', '.')}.{name}")
    text = Path(str(module.__file__)).read_text()
    lines = text.splitlines()
    module_node = ast.parse(text)
    parents: list[ast.Module | ast.ClassDef] = [module_node]
    parents += [node for node in module_node.body if isinstance(node, ast.ClassDef)]
    for parent in parents:
        holder = getattr(module, parent.name) if isinstance(parent, ast.ClassDef) else module
        for node in parent.body:
            if isinstance(node, ast.FunctionDef) and "source: Source" not in ast.unparse(node.args):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                expected = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))
                assert function_text(vars(holder)[node.name]) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_fix_imports_nothing_but_the_engine(name: str) -> None:
    """Loading it in a training process costs next to nothing, and `status` imports no torch."""
    tree = ast.parse((Path(fixes.folder(fixes.package_of(name))) / f"{name}.py").read_text())
    modules = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    assert {str(module).split(".")[0] for module in modules} <= {"ckpt_patches", "collections", "typing", "ast"}
