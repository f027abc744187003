"""What holds for every fix: its file, its place in the registry, its page, its test, its line in the change log."""

import ast
import importlib
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edits
from ckpt_patches import PREFIXES
from ckpt_patches.cli.status import FIXED_UPSTREAM, NOT_PRESENT
from ckpt_patches.engine import fix as fixes
from ckpt_patches.engine import plan
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.plan import Outcome, fixes_for, plan_tree
from ckpt_patches.engine.registry import CORE, DEEPSPEED, EVERYTHING, FIXES, SWITCHED, TARGETS, folder
from ckpt_patches.engine.source import function_text
from upstream import MAIN, MAIN_VARIABLES, PLAN, REPOSITORY, in_place, main_branch, newest_affected, releases, tree

NAMES = list(FIXES)
NEWEST = pytest.mark.parametrize(
    ("distribution", "package", "version"), [("megatron-core", CORE, "0.19.2"), ("deepspeed", DEEPSPEED, "0.19.8")]
)


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_index_has_what_the_fix_states(name: str) -> None:
    """It is made from the text of the files; these are the loaded definitions."""
    fix = fixes.load(name)
    assert fix.name == name
    # A package's own file is no module that an import names: the hook does not look it up.
    concerned = [module for module in [fix.concerns] if module and not module.endswith(".__init__")]
    assert EVERYTHING[name] == tuple(dict.fromkeys([*(edit.module for edit in fix.edits), *concerned]))
    assert {TARGETS[module] for module in EVERYTHING[name]} == {fix.package}
    assert all(module.startswith(PREFIXES) for module in EVERYTHING[name])  # what the import hook looks at first
    assert name in (SWITCHED[fix.switch] if fix.switch else FIXES)
    assert all(NAMES.index(other) < NAMES.index(name) for other in fix.depends_on)


@pytest.mark.parametrize("name", NAMES)
def test_a_fix_has_its_file_page_tests_and_change_log_line(name: str) -> None:
    fix = fixes.load(name)
    assert (Path(folder(fix.package)) / "upstream_tests" / Path(fix.test).name).exists()
    assert (REPOSITORY / "docs" / f"{name}.md").exists()
    assert (REPOSITORY / "tests" / f"test_{name}.py").exists()
    assert f"`{name}`" in (REPOSITORY / "CHANGELOG.md").read_text()
    assert f"`{name}`" in (REPOSITORY / "README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_is_one_sentence_and_an_upstream_link(name: str) -> None:
    text = (Path(folder(fixes.package_of(name))) / f"{name}.py").read_text()
    sentence, blank, link = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    assert sentence.endswith(".")
    assert blank == ""
    assert link.startswith("https://github.com/")
    assert link in fixes.load(name).upstream


@pytest.mark.parametrize("version", releases("megatron-core"))
def test_no_fix_is_without_a_match_on_a_megatron_core_release(version: str) -> None:
    assert plan_tree(str(tree("megatron-core", version)), CORE).named(Outcome.NO_MATCH) == []


@pytest.mark.parametrize("version", releases("deepspeed"))
def test_no_fix_is_without_a_match_on_a_deepspeed_release(version: str) -> None:
    assert plan_tree(str(tree("deepspeed", version)), DEEPSPEED).named(Outcome.NO_MATCH) == []


@NEWEST
def test_what_is_written_in_place_is_what_the_hook_runs(distribution: str, package: str, version: str) -> None:
    """Of every module: so that most tests of what a fix does need not be run on both."""
    root = tree(distribution, version)
    made, written = plan_tree(str(root), package), str(in_place(root))
    assert {module: Path(plan.module_path(written, module)).read_bytes() for module in made.files} == {
        module: file.patched for module, file in made.files.items()
    }


# A fix and the main branch of its package, where a checkout of that is named.
ON_MAIN = [
    pytest.param(name, MAIN, PLAN, id=f"{name}-{MAIN}-{PLAN}", marks=pytest.mark.compat(fix=name))
    for name in NAMES
    if main_branch(DISTRIBUTIONS[fixes.package_of(name)])
]


@pytest.mark.skipif(not ON_MAIN, reason=f"needs a checkout in one of {', '.join(MAIN_VARIABLES.values())}")
@pytest.mark.parametrize(("name", "version", "delivery"), ON_MAIN)
def test_a_plan_on_main(name: str, version: str, delivery: str, record_property: Callable[[str, object], None]) -> None:
    """Edited by itself, as in `apply NAME`; the compatibility page says so of a fix that was not run there."""
    result, _ = edits.plan(tree(DISTRIBUTIONS[fixes.package_of(name)], version), name)
    assert result.outcome is not Outcome.NO_MATCH, result.reason
    words = {Outcome.APPLIES: "applies", Outcome.ALREADY_THERE: FIXED_UPSTREAM, Outcome.NOT_PRESENT: NOT_PRESENT}
    record_property("compat", words[result.outcome])


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
    module = importlib.import_module(f"{Path(folder(fixes.package_of(name))).name}.{name}")
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
                found = getattr(holder, node.name)
                function: Any = found.fget if isinstance(found, property) else found
                assert function_text(function) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_fix_imports_nothing_but_the_engine(name: str) -> None:
    """Loading it in a training process costs next to nothing, and `status` imports no torch."""
    tree = ast.parse((Path(folder(fixes.package_of(name))) / f"{name}.py").read_text())
    modules = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    assert {str(module).split(".")[0] for module in modules} <= {"ckpt_patches", "collections", "typing", "ast"}


# Releases that need it, before upstream rewrote its code and after; of other fixes the newest that they are for.
IN_PARTS = {
    "zarr_create_synchronizer": "0.7.0 0.14.0",
    "zarr_range_write": "0.7.0 0.14.0",
    "dp_zero_empty_state": "0.7.0 0.14.0 0.19.2",
    "torch_adam_step": "0.14.0 0.19.2",
    "reshardable_padding_flag": "0.14.0 0.16.1",
    "reshardable_padding_save": "0.14.0 0.19.2",
    "fully_reshardable_shift": "0.19.2",
    "async_save_staging": "0.12.0 0.19.2",
    "sharding_type_default": "0.19.2",
    "resume_param_groups": "0.7.0 0.16.1 0.19.2",
    "override_learning_rate": "0.14.0 0.19.2",
    "hybrid_offload_reload": "0.14.0 0.19.2",
    "hybrid_offload_resume": "0.14.0 0.19.2",
    "dp_zero_lean_gather": "0.7.0 0.14.0 0.19.2",
    "numpy2_product": "0.7.0 0.14.0",
    "universal_tensor_paddings": "0.12.6 0.16.2 0.19.8",
    "zero3_fragment_bounds": "0.16.2 0.19.2",
    "zero3_universal_rank": "0.14.5 0.16.2",
    "zero3_universal_groups": "0.19.2 0.19.8",
    "zero3_universal_save": "0.14.5 0.16.2",
    "torch_load_weights_only": "0.12.6 0.15.4",
    "universal_fragment_rebind": "0.16.2 0.19.2",
    "optimizer_state_links": "0.16.2 0.19.8",
    "universal_empty_group": "0.16.2 0.19.8",
    "universal_experts": "0.14.4 0.19.8",
    "universal_all_moments": "0.14.0",
    "universal_step": "0.12.2",
    "universal_group_settings": "0.12.6 0.14.0",
    "rank_order": "0.12.6 0.14.0",
    "bf16_stage0_state": "0.18.4 0.19.8",
    "latest_after_all_ranks": "0.12.6 0.19.8",
    "bf16_wrapper_name": "0.18.4",
}


def test_only_fixes_are_taken_apart() -> None:
    assert IN_PARTS.keys() <= set(NAMES)


@pytest.mark.parametrize(
    ("name", "version"), [(name, version) for name in NAMES for version in IN_PARTS.get(name, "newest").split()]
)
def test_a_fork_with_a_part_of_a_fix_is_completed_or_told_what_is_missing(
    name: str, version: str, tmp_path: Path
) -> None:
    """Each of its edits is left out in turn. It is never taken for a release in which the bug is fixed."""
    package = fixes.package_of(name)
    release = newest_affected(name) if version == "newest" else (DISTRIBUTIONS[package], version)
    copy = edits.copy_of(tree(*release), name, tmp_path)
    planned = plan._Tree(str(copy), {}, {})
    assert plan._try(name, planned).outcome is Outcome.APPLIES
    sources = {module: source for module, source in planned.sources.items() if source and source.edits}
    whole = {module: source.edited() for module, source in sources.items()}
    edits.check_twice_changes_nothing(copy, name)
    for module, source in sources.items():
        wanted = list(source.edits)
        for left_out in wanted:
            source.edits = [edit for edit in wanted if edit is not left_out]
            if edits.is_same_code(source.edited(), whole[module]):
                continue  # it is of a comment
            Path(source.path).write_bytes(source.edited())
            made = plan_tree(str(tmp_path), package, [name])
            result = made.results[0]
            completed = result.outcome is Outcome.APPLIES and made.files[module].patched == whole[module]
            assert completed or result.outcome is Outcome.NO_MATCH, (left_out, result)
        Path(source.path).write_bytes(whole[module])
