"""The patches for upstream as shipped: `diff --split`, `git am` on a clean tree, and their tests there.

No hook is active: these tests check the text of the patches, on the newest release that contributors work on.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from ckpt_patches.engine import fix as fixes
from ckpt_patches.engine import registry
from ckpt_patches.engine.diffs import upstream_test
from ckpt_patches.engine.fix import load, package_of
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.plan import plan_tree
from ckpt_patches.engine.registry import APEX, DEEPSPEED
from registered import FIXES
from upstream import newest, run_pytest, tree

pytestmark = pytest.mark.slow

PACKAGES = {distribution: package for package, distribution in DISTRIBUTIONS.items()}
FOREIGN = re.compile(
    r"\b(some|all|later|newer|older|earlier) releases\b|\b(since|until|up to) \d+\.\d+|import hook|ckpt.patches"
)
OPTIONS = ("-rA", "--tb=short", "-W", "ignore", "--color=no")


NEWEST = [(distribution, newest(distribution)) for distribution in (DISTRIBUTIONS[one] for one in registry.PACKAGES)]


@pytest.mark.parametrize(("distribution", "version"), NEWEST)
def test_each_patch_of_the_series(distribution: str, version: str, tmp_path: Path) -> None:
    """Each test fails before its patch and passes after it, and at the end of the series."""
    checkout = checkout_of(distribution, version, tmp_path / "clean")
    patches = split(checkout, tmp_path / "patches")
    assert {name: found for name, patch in patches.items() if (found := foreign_lines(patch))} == {}
    before: dict[str, set[str]] = {}
    after: dict[str, set[str]] = {}
    for name, patch in patches.items():
        path, text = upstream_test(name)
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_bytes(text)
        before |= outcomes(checkout, [name], "--exitfirst")  # a failing rank may leave other ranks waiting
        (checkout / path).unlink()
        am(checkout, [patch])
        after |= outcomes(checkout, [name])
    assert {name: "FAILED" in found and "ERROR" not in found for name, found in before.items()} == dict.fromkeys(
        patches, True
    )
    assert after == outcomes(checkout, list(patches)) == {name: {"PASSED"} for name in patches}
    assert_planned(checkout, distribution, version, patches)


@pytest.mark.parametrize("distribution", ["megatron-core", "deepspeed", "nvidia-resiliency-ext"])
def test_one_patch_with_what_it_depends_on(distribution: str, tmp_path: Path) -> None:
    """What is sent alone, by `diff --split DIR FIX`, applies to a clean tree."""
    clean = checkout_of(distribution, newest(distribution), tmp_path / "clean")
    base = git(clean, "rev-parse", "HEAD")
    for name in (name for name in FIXES if load(name).test and package_of(name) == PACKAGES[distribution]):
        patches = split(clean, tmp_path / name, name)
        assert list(patches)[-1] == name
        am(clean, list(patches.values()))
        git(clean, "reset", "--quiet", "--hard", base)


@pytest.mark.parametrize(("distribution", "version"), [("megatron-core", "0.14.0"), ("deepspeed", "0.16.9")])
def test_the_series_for_an_older_tree(distribution: str, version: str, tmp_path: Path) -> None:
    """With fixes that the newest release does not need, which have no test for upstream."""
    clean = checkout_of(distribution, version, tmp_path / "clean")
    patches = split(clean, tmp_path / "patches")
    assert {bool(load(name).test) for name in patches} == {True, False}
    am(clean, list(patches.values()))
    assert_planned(clean, distribution, version, patches)


def assert_planned(checkout: Path, distribution: str, version: str, names: Iterable[str]) -> None:
    """The files of a checkout have the text that is planned for a diff with these fixes."""
    planned = plan_tree(str(tree(distribution, version)), PACKAGES[distribution], names, for_upstream=True)
    assert planned.files
    for file in planned.files.values():
        assert (checkout / os.path.relpath(file.path, planned.root)).read_bytes() == file.patched


def foreign_lines(patch: Path) -> list[str]:
    """Added lines that a reviewer of one release cannot know: about other releases or this project's tools."""
    lines = patch.read_text().partition("\ndiff --git")[2].splitlines()
    return [line for line in lines if line.startswith("+") and FOREIGN.search(line)]


def checkout_of(distribution: str, version: str, folder: Path) -> Path:
    """A clean git tree, as a contributor has it: the package of a release."""
    source = tree(distribution, version)
    checkout = folder / source.name  # the name selects the environment
    top = PACKAGES[distribution].partition(".")[0]
    ignored = shutil.ignore_patterns("__pycache__", *(() if distribution == "torch" else ("*.so",)))
    shutil.copytree(source / top, checkout / top, symlinks=True, ignore=ignored)
    if distribution == "nvidia-resiliency-ext":  # its package does not state its release
        (checkout / f"nvidia_resiliency_ext-{version}.dist-info").mkdir()
    git(checkout, "init", "--quiet")
    git(checkout, "add", "--all", "--force")
    git(checkout, "commit", "--quiet", "--message", version)
    return checkout


def split(checkout: Path, folder: Path, *names: str) -> dict[str, Path]:
    """The patches that `ckpt-patches diff --split` writes, by fix and in their order."""
    command = [sys.executable, "-m", "ckpt_patches", "diff", *names, "--split", str(folder), "--tree", str(checkout)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **IDENTITY})
    return {re.sub(r"^\d{4}-", "", path.stem): path for path in sorted(folder.iterdir())}


def am(checkout: Path, patches: Sequence[Path]) -> None:
    for patch in patches:
        git(checkout, "am", "--quiet", "--whitespace=error-all", str(patch))


IDENTITY = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    **{f"GIT_{who}_NAME": "Zoë Å" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "zoe@example.org" for who in ("AUTHOR", "COMMITTER")},
}


def git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(checkout), *arguments], capture_output=True, text=True, env={**os.environ, **IDENTITY}
    )
    assert done.returncode == 0, f"git {' '.join(arguments)}: {done.stderr}"
    return done.stdout.strip()


def outcomes(checkout: Path, names: Sequence[str], *options: str) -> dict[str, set[str]]:
    """The outcomes that pytest reports for the tests of some fixes in a checkout; no hook is active."""
    is_deepspeed = fixes.package_of(names[0]) == DEEPSPEED
    plugin = "apex_on_cpu" if fixes.package_of(names[0]) == APEX else "python_312"
    try:
        found = run_pytest(
            *(checkout / load(name).test for name in names),
            rootdir=checkout,
            tree=checkout,
            path=[checkout / "tests"],
            options=(
                *OPTIONS,
                *options,
                *(("-p", "unit.common") if is_deepspeed else ("--noconftest", "-p", plugin)),
            ),
            env={"LOCAL_SIZE": "4", "DS_UNITTEST_TIMEOUT": "300"},  # DeepSpeed harness: ranks, seconds per test
            timeout=1800,
            imports=("torch", "torch._dynamo"),  # not the package, which the next patch changes
        )
    except subprocess.TimeoutExpired:
        if "--exitfirst" not in options:  # without the patch, a failing rank can leave another rank waiting forever
            raise
        return {name: {"FAILED"} for name in names}
    assert "not enough GPUs" not in found, found
    found = re.sub(r"\x1b\[[\d;]*m", "", found)  # DeepSpeed's own harness always prints colors
    by_fix: dict[str, set[str]] = {name: set() for name in names}
    for outcome, name in re.findall(r"^(PASSED|FAILED|ERROR) .*?test_(\w+)\.py", found, re.MULTILINE):
        by_fix[name].add(outcome)
    if "Test hanged" in found:  # DeepSpeed's harness prints it if a rank fails and another rank waits for it
        by_fix[names[0]].add("FAILED")
    if any(outcome != {"PASSED"} for outcome in by_fix.values()):
        print(found)  # shown if the test fails
    return by_fix
