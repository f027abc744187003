"""The tests that `diff --with-test` adds for upstream's suite: each fails before its fix, and passes after."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import zygotes
from ckpt_patches.engine.diffs import upstream_test
from ckpt_patches.engine.fix import folder, load, package_of
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.plan import Outcome, plan_tree
from ckpt_patches.engine.registry import CORE, FIXES
from upstream import PLAIN, environment_for, newest_by_default, releases, run_pytest, tree

OPTIONS = ("-rA", "--tb=line", "-W", "ignore")
# A fix of one file and one of two, each on the newest release under test that has the bug; the last in the default run.
CONTRIBUTIONS = [("zero3_fragment_bounds", "0.19.2"), ("hybrid_offload_reload", "0.16.1")]
MEGATRON = releases("megatron-core")


def file_of(name: str) -> Path:
    """A fix's upstream test in our repository."""
    return Path(folder(package_of(name))) / "upstream_tests" / Path(load(name).test).name


def by_fix(stdout: str) -> dict[str, set[str]]:
    """From pytest's summary, the outcomes of each fix's tests."""
    found: dict[str, set[str]] = {}
    for outcome, name in re.findall(r"^(PASSED|FAILED|ERROR) .*?test_(\w+)\.py", stdout, re.MULTILINE):
        found.setdefault(name, set()).add(outcome)
    return found


@pytest.mark.parametrize("version", MEGATRON)
def test_fail_before_and_pass_after(version: str) -> None:
    """All that a release needs, in one process; those of the DeepSpeed fixes are run in the fixes' own tests."""
    root = tree("megatron-core", version)
    names = plan_tree(str(root), CORE).named(Outcome.APPLIES)
    files = [file_of(name) for name in names]
    before, after = (
        by_fix(
            run_pytest(
                *files, rootdir=files[0].parent, options=OPTIONS, tree=root, delivery=delivery, imports=zygotes.CORE
            )
        )
        for delivery in ("none", "hook")
    )
    assert before.keys() == after.keys() == set(names)
    assert [name for name, outcomes in before.items() if "FAILED" not in outcomes] == [], before
    assert not [name for name, outcomes in before.items() if "ERROR" in outcomes], before
    assert all(outcomes == {"PASSED"} for outcomes in after.values()), after


@pytest.mark.slow
@pytest.mark.parametrize(("name", "version"), newest_by_default(CONTRIBUTIONS))
def test_a_contribution(name: str, version: str, tmp_path: Path) -> None:
    """diff --with-test, git apply: the test passes in the checkout, and fails with the test alone."""
    package = package_of(name)
    checkout = checkout_of(package, version, tmp_path / "checkout")
    command = [sys.executable, "-m", "ckpt_patches", "diff", name, "--tree", str(checkout), "--with-test"]
    patch = tmp_path / "fix.patch"
    patch.write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)

    git(checkout, "apply", "--check", "--whitespace=error", str(patch))
    git(checkout, "apply", str(patch))
    added, _ = upstream_test(package, name)
    assert (checkout / added).read_bytes() == file_of(name).read_bytes()
    assert run_test(checkout, added) == {name: {"PASSED"}}

    git(checkout, "checkout", "--quiet", ".")  # the edited files; the test is not tracked
    assert (checkout / added).exists()
    assert "FAILED" in run_test(checkout, added)[name]


def checkout_of(package: str, version: str, checkout: Path) -> Path:
    """A repository with the upstream package in it, as a contributor has it."""
    source = tree(DISTRIBUTIONS[package], version)
    top = package.split(".")[0]
    shutil.copytree(source / top, checkout / top, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    git(checkout, "init", "--quiet")
    git(checkout, "add", "--all", "--force")
    git(checkout, "commit", "--quiet", "--message", version)
    return checkout


def git(checkout: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=contributor", "-c", "user.email=contributor@example.invalid")
    subprocess.run(
        ["git", *identity, *arguments],
        cwd=checkout,
        check=True,
        env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull},
    )


def run_test(checkout: Path, test: str) -> dict[str, set[str]]:
    """Run one test of the checkout without the hook, from the checkout."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", test, *PLAIN, "--rootdir", ".", *OPTIONS],
        cwd=checkout,
        env=environment_for(checkout, "none"),
        text=True,
        capture_output=True,
        timeout=120,
    )
    return by_fix(done.stdout)


@pytest.mark.parametrize("name", FIXES)
def test_stands_alone(name: str) -> None:
    """Nothing of ours is imported: it has to run in a checkout that never heard of us."""
    tree = ast.parse(file_of(name).read_text())
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert not [m for m in modules if re.match(r"ckpt_patches|\w+_patches|megatron\.patches", m)]
    assert any(m.startswith((CORE, "deepspeed")) for m in modules)


@pytest.mark.parametrize("name", FIXES)
def test_goes_where_upstream_keeps_such_tests(name: str) -> None:
    path = load(name).test
    assert file_of(name).is_file()
    assert path.startswith("tests/unit_tests/" if package_of(name) == CORE else "tests/unit/")
    assert Path(path).name == f"test_{name}.py"
