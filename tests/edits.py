"""Check what a fix changes in a tree, for tests of the edits themselves on copies of a few files."""

import ast
import os
import shutil
from pathlib import Path

from ckpt_patches.engine.fix import load
from ckpt_patches.engine.plan import FixResult, Outcome, TreePlan, module_path, plan_tree
from registered import EVERYTHING, FIXES, TARGETS

VERSIONS = ("megatron.core.package_info", "deepspeed.git_version_info_installed", "torch.version")


def copy_of(tree: Path, fix: str, to: Path) -> Path:
    """Copy only the files that a fix edits, and those that tell whether it concerns the release, to a new tree."""
    for module in {*EVERYTHING[fix], *(edit.module for edit in load(fix).edits), *VERSIONS}:
        source, target = module_path(str(tree), module), module_path(str(to), module)
        if os.path.exists(source):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copyfile(source, target)
    for recorded in tree.glob("*.dist-info"):  # the only source of NVRx's version
        (to / recorded.name).mkdir(exist_ok=True)
    return to


def is_for_upstream_alone(fix: str) -> bool:
    """Whether a fix is only in patches for upstream: neither the hook nor `apply` makes its edits."""
    return load(fix).is_for_upstream_alone


def plan(tree: Path, fix: str, *, for_upstream: bool = False) -> tuple[FixResult, TreePlan]:
    for_upstream = for_upstream or is_for_upstream_alone(fix)
    made = plan_tree(str(tree), TARGETS[FIXES[fix][0]], [fix], for_upstream=for_upstream)
    return made.results[0], made


def check_not_needed(tree: Path, fix: str) -> None:
    """Check that a fix has nothing to change in a tree, and says so."""
    result, made = plan(tree, fix)
    assert (result.outcome, made.files) == (Outcome.NOT_NEEDED, {}), result


def write(made: TreePlan) -> None:
    for file in made.files.values():
        Path(file.path).write_bytes(file.patched)


def rewrite(tree: Path, module: str, old: str, new: str) -> None:
    """Replace `old`, which must be there, in a file of a copied tree."""
    path = Path(module_path(str(tree), module))
    text = path.read_text()
    assert old in text, f"expected {old!r} in {path}"
    path.write_text(text.replace(old, new))


def text(tree: Path, module: str) -> str:
    """A module's source in a tree."""
    return Path(module_path(str(tree), module)).read_text()


def is_same_code(text: bytes, other: bytes) -> bool:
    """Whether two sources differ at most in comments and layout; false if one does not parse."""
    try:
        return ast.dump(ast.parse(text)) == ast.dump(ast.parse(other))
    except SyntaxError:
        return False
