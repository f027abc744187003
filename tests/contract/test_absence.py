"""A fix is never silently off: code that a tested release has and a tree lacks is a mismatch, and nothing else is.

ckpt_patches/engine/outcomes.py records what each edit finds in each release.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edits
from ckpt_patches.engine import fix as fixes
from ckpt_patches.engine import plan
from ckpt_patches.engine.absence import compared_with, of_release, unrecorded
from ckpt_patches.engine.installed import DISTRIBUTIONS, version_in
from ckpt_patches.engine.plan import FixResult, Outcome, TreePlan, module_path, plan_tree
from ckpt_patches.engine.registry import CORE, DEEPSPEED, EVERYTHING, FOLDERS, SWITCHED, TORCH
from ckpt_patches.engine.releases import RECORDED
from ckpt_patches.engine.source import Source
from contract import outcomes
from upstream import RELEASES, all_releases, tree

DEFAULT = [
    pytest.param(package, version, id=f"{package}-{version}")
    for package in FOLDERS
    for version in RECORDED[package]
    if any((r.distribution, r.version, True) == (DISTRIBUTIONS[package], version, r.default) for r in RELEASES)
    or all_releases()
]
NEW = "9.9.9"


def with_fixes() -> Iterator[Any]:
    for parameter in DEFAULT:
        package, version = parameter.values
        for fix in EVERYTHING:
            if fixes.package_of(fix) == package:
                yield pytest.param(fix, version, id=f"{fix}-{version}")


def planned(root: Path, fix: str, **originals: Any) -> tuple[FixResult, TreePlan]:
    made = plan_tree(str(root), fixes.package_of(fix), [fix], **originals)
    return made.results[0], made


# The record


@pytest.mark.parametrize(("package", "version"), DEFAULT)
def test_the_record_has_what_the_fixes_find(package: str, version: str) -> None:
    assert outcomes.found(package, version) == outcomes.recorded(package, version), outcomes.COMMAND


def test_the_record_is_of_the_fixes_that_there_are() -> None:
    record = {
        fix: {v: "".join(of_release(fix, fixes.package_of(fix), v)) for v in RECORDED[fixes.package_of(fix)]}
        for fix in EVERYTHING
    }
    assert outcomes.MODULE.read_text() == outcomes.text(record), outcomes.COMMAND
    assert outcomes.MODULE.stat().st_size < 8192
    for fix in EVERYTHING:
        lengths = {len(of_release(fix, fixes.package_of(fix), version)) for version in record[fix]}
        assert lengths == {len(fixes.load(fix).edits)}, outcomes.COMMAND


@pytest.mark.parametrize(
    ("version", "compared"),
    [
        ("0.15.0", ("0.15.0",)),
        ("0.15.0rc4", ("0.15.0", "0.14.0")),
        ("0.16.1+8", ("0.16.1", "0.16.0")),
        ("0.11.0", ("0.12.0",)),
        ("0.99.0", RECORDED[CORE][-1:]),
        ("?", RECORDED[CORE][-1:]),
        ("main", RECORDED[CORE][-1:]),
    ],
)
def test_an_untested_version_is_compared_with_the_tested_ones_around_it(
    version: str, compared: tuple[str, ...]
) -> None:
    assert compared_with(CORE, version) == compared


def test_a_build_of_torch_is_compared_with_its_release() -> None:
    assert compared_with(TORCH, "2.13.0+cpu") == ("2.13.0",)
    assert compared_with(TORCH, "2.6.0a0+ecf3bae40a.nv25.01") == ("2.6.0", "2.5.1")


def test_a_commit_on_the_way_to_a_release_is_like_the_one_before_or_like_it() -> None:
    """A pre-release of 0.15.0, which added format fully_reshardable, may lack its code or have it."""
    assert unrecorded("fully_reshardable_shift", CORE, "0.15.0rc4", "-") is None
    assert unrecorded("fully_reshardable_shift", CORE, "0.15.0rc4", "m") is None
    assert unrecorded("fully_reshardable_shift", CORE, "0.15.0", "-") == (0, "0.15.0")
    assert unrecorded("fully_reshardable_shift", CORE, "?", "-") == (0, RECORDED[CORE][-1])
    assert unrecorded("fully_reshardable_shift", CORE, "0.14.0", "-") is None


def test_a_checkout_on_the_way_to_a_release_is_not_that_release(tmp_path: Path) -> None:
    """Only pip's 0.19.0 counts as release 0.19.0, not a checkout: upstream's main states the next release."""
    fix = "dp_zero_empty_state"
    copy = edits.copy_of(tree("megatron-core", "0.18.2"), fix, tmp_path)
    package_info = copy / "megatron" / "core" / "package_info.py"
    text = package_info.read_text().replace("MINOR = 18", "MINOR = 19").replace("PATCH = 2", "PATCH = 0")
    package_info.write_text(text)
    (released,) = copy.glob("*.dist-info")
    released.rename(copy / released.name.replace("0.18.2", "0.19.0"))
    assert version_in(copy, CORE) == "0.19.0"
    assert planned(copy, fix)[0].outcome is Outcome.NO_MATCH
    (copy / released.name.replace("0.18.2", "0.19.0")).rmdir()
    assert planned(copy, fix)[0].outcome is Outcome.APPLIES


# Mismatches


@pytest.mark.parametrize("overlay", [(), tuple(SWITCHED)])
@pytest.mark.parametrize(("package", "version"), DEFAULT)
def test_a_release_misses_nothing(package: str, version: str, overlay: tuple[str, ...]) -> None:
    made = plan_tree(str(tree(DISTRIBUTIONS[package], version)), package, plan.fixes_for(package, (), overlay))
    assert made.named(Outcome.NO_MATCH) == []


@pytest.mark.parametrize(("fix", "version"), list(with_fixes()))
def test_a_moved_file_is_missed(fix: str, version: str, tmp_path: Path) -> None:
    copy = edits.copy_of(tree(DISTRIBUTIONS[fixes.package_of(fix)], version), fix, tmp_path)
    before, _ = planned(copy, fix)
    assert before.outcome is not Outcome.NO_MATCH, before
    for number, edit in enumerate(fixes.load(fix).edits):
        path = Path(module_path(str(copy), edit.module))
        if path.exists():
            path.rename(path.with_suffix(".moved"))
            after, made = planned(copy, fix)
            path.with_suffix(".moved").rename(path)
            assert after.found == before.found or (after.outcome, made.files) == (Outcome.NO_MATCH, {}), edit
            assert before.found[number] == "-" or after.outcome is Outcome.NO_MATCH, edit


@pytest.mark.parametrize(("fix", "version"), list(with_fixes()))
def test_a_renamed_class_or_function_is_missed(
    fix: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renamed class or function is a mismatch, or the same edits are made under the other name."""
    root = edits.copy_of(tree(DISTRIBUTIONS[fixes.package_of(fix)], version), fix, tmp_path)
    sources = observed(root, fix, monkeypatch)
    before, made = planned(root, fix)
    whole = {file.path: file.patched for file in made.files.values()}
    for path, source in sources.items():
        for name in source.definitions():
            renamed = renaming(name)
            after, other = planned(root, fix, originals={path: renamed(bytes(source.data))})
            patched = {file.path: file.patched for file in other.files.values()}
            same = after.found == before.found and patched == {
                edited: renamed(text) if edited == path else text for edited, text in whole.items()
            }
            assert same or (after.outcome, patched) == (Outcome.NO_MATCH, {}), (name, before, after)


class ObservedText(bytes):
    """The text of a module; records the strings that are looked up in it."""

    searched: set[bytes]

    def __contains__(self, text: object) -> bool:
        assert isinstance(text, bytes)
        self.searched.add(text)
        return super().__contains__(text)


class ObservedSource(Source):
    """A source that records which functions and classes a fix looks up."""

    def __init__(self, data: bytes, path: str) -> None:
        text = ObservedText(data)
        text.searched = set()
        super().__init__(text, path)
        self.searched = text.searched
        self.named: set[str] = set()

    def definitions(self) -> list[str]:
        """The names of the functions and classes of this module that a fix looks up or edits."""
        words = " ".join([*(name.replace(".", " ") for name in self.named), *(s.decode() for s in self.searched)])
        defined: list[ast.FunctionDef | ast.ClassDef] = [*self.all_of(ast.FunctionDef), *self.all_of(ast.ClassDef)]
        around = {
            node.name
            for node in defined
            for edit in self.edits
            if self._span(node)[0] <= edit.start and edit.stop <= self._span(node)[1]
        }
        return sorted({node.name for node in defined} & {*re.findall(r"\w+", words), *around})

    def function(self, name: str) -> Any:
        self.named.add(name)
        return super().function(name)

    def class_named(self, name: str) -> Any:
        self.named.add(name)
        return super().class_named(name)


def observed(root: Path, fix: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, ObservedSource]:
    """The sources of a tree by path, with what a fix looked up in them."""
    sources: dict[str, ObservedSource] = {}

    def observe(data: bytes, path: str) -> Source:
        return sources.setdefault(path, ObservedSource(data, path))

    with monkeypatch.context() as patching:
        patching.setattr(plan, "Source", observe)
        planned(root, fix)
    return sources


class renaming:
    """Rename all definitions of a name, and nothing else."""

    def __init__(self, name: str) -> None:
        self.pattern = re.compile(rb"(?m)^(\s*(?:async )?(?:def|class) " + name.encode() + rb")\b")

    def __call__(self, text: bytes) -> bytes:
        return self.pattern.sub(rb"\1_renamed", text)


@pytest.mark.parametrize(("package", "version"), [(CORE, RECORDED[CORE][-1]), (DEEPSPEED, RECORDED[DEEPSPEED][-1])])
def test_a_newer_release_is_compared_with_the_newest_tested_one(package: str, version: str, tmp_path: Path) -> None:
    """A newer release with the same code has no mismatch; without one of the files, the fixes of that file have one."""
    (root,) = {edits.copy_of(tree(DISTRIBUTIONS[package], version), fix, tmp_path) for fix in plan.fixes_for(package)}
    for module in edits.VERSIONS:
        path = Path(module_path(str(root), module))
        if path.exists():
            path.write_text(path.read_text().replace("MAJOR = 0", "MAJOR = 9").replace(f"'{version}'", f"'{NEW}'"))
    assert version_in(root, package) not in RECORDED[package]
    results = plan_tree(str(root), package).results
    assert {r.name: list(r.found) for r in results} == {r.name: of_release(r.name, package, version) for r in results}
    module = {CORE: "megatron.core.optimizer.distrib_optimizer", DEEPSPEED: "deepspeed.runtime.zero.stage3"}[package]
    Path(module_path(str(root), module)).unlink()
    missed = [r for r in plan_tree(str(root), package).results if r.outcome is Outcome.NO_MATCH]
    concerned = {
        r.name
        for r in results
        if any(
            edit.module == module and word != "-" for edit, word in zip(fixes.load(r.name).edits, r.found, strict=True)
        )
    }
    assert {r.name for r in missed} == concerned != set()
    assert all("was not tested without it" in r.reason or "other files are there" in r.reason for r in missed)
