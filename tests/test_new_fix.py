"""`tests/new_fix.py` creates files in our style whose tests fail until the fix is written."""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import new_fix
from ckpt_patches.errors import UserError
from installs import Environment, copy_working_tree, editable, failed_tests
from upstream import REPOSITORY, all_releases, trees

NAME, URL = "lost_momentum", "https://github.com/someone/something/issues/1"
MODULES = {"megatron": "megatron.core.optimizer.optimizer", "deepspeed": "deepspeed.runtime.engine"}
FOLDERS = {"megatron": "megatron/patches", "deepspeed": "deepspeed_patches"}
MODULE = MODULES["megatron"]


@pytest.fixture
def clone() -> Iterator[Path]:
    """A copy of the working tree that unprivileged users can read, as some of its tests need."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield copy_working_tree(Path(folder, "clone"))


def run(environment: Environment, clone: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return environment.python(*command, cwd=clone, CKPT_PATCHES_TREES=str(trees()))


def scaffold(environment: Environment, clone: Path, package: str) -> subprocess.CompletedProcess[str]:
    return run(environment, clone, "tests/new_fix.py", NAME, "--module", MODULES[package], "--upstream", URL)


@pytest.mark.parametrize("package", MODULES)
def test_the_files_of_a_fix_are_made_in_our_style_and_its_tests_fail(package: str, clone: Path) -> None:
    environment = editable(clone)
    done = scaffold(environment, clone, package)
    assert (done.returncode, done.stderr) == (0, "")
    folder = FOLDERS[package]
    made = {f"{folder}/{NAME}.py", f"{folder}/demos/{NAME}.py", f"{folder}/upstream_tests/test_{NAME}.py"}
    made |= {f"docs/{NAME}.md", new_fix.CHANGES}
    listed, _, next_steps = done.stdout.partition("\n\n")
    assert set(listed.splitlines()) == made
    assert max(map(len, next_steps.splitlines())) <= 120
    for style in (["check"], ["format", "--check"]):
        checked = run(environment, clone, "-m", "ruff", *style, ".")
        assert checked.returncode == 0, checked.stdout

    chosen = ("tests/contract/test_fix_contract.py", "-k", f"demonstration_shows and {NAME}")
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen)
    tests = environment.python(*command, cwd=clone, CKPT_PATCHES_TREES=str(trees()), CKPT_PATCHES_TEST_FIXES="1")
    assert tests.returncode == 1
    assert "what users do, and return what is wrong" in tests.stdout
    assert " passed" not in tests.stdout.splitlines()[-1]

    again = scaffold(environment, clone, package)
    assert (again.returncode, again.stderr) == (2, f"there is a fix {NAME} already\n")


# Tests that concern each or all of the fixes; and others that might.
OF_ALL_FIXES = "fix_table help map readme rooms"
OTHERS = "command compatibility completion demonstrations format_patch json training_modules"
OF_THE_RECORD = (
    "test_absence.py::test_(the_record_|a_newer_release_is_compared)|test_readme.py::test_the_number_of_fixes_is_theirs"
)


@pytest.mark.slow
@pytest.mark.parametrize("package", MODULES if all_releases() else ["megatron"])
def test_a_fresh_scaffold_fails_its_own_tests_alone(package: str, clone: Path) -> None:
    names = [*OF_ALL_FIXES.split(), *(OTHERS.split() if all_releases() else ())]
    scaffold(editable(clone), clone, package)
    # Tests of one fix run only for the new one.
    chosen = f"not demonstration_shows and ({NAME} or not (test_fix_contract or is_missed))"
    failed = failed_tests(clone, "-k", chosen, "tests/contract", of_fixes=True)
    failed += failed_tests(clone, "-k", chosen, "tests/contract", *(f"tests/test_{name}.py" for name in names))
    # These need a new record of outcomes and the README's number of fixes, as in CONTRIBUTING.
    assert [test for test in failed if NAME not in test and not re.search(OF_THE_RECORD, test)] == []
    for needed in ("test_a_fix_is_on_the_map", "test_the_row_of_a_fix_is_current"):
        assert any(needed in test for test in failed)


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("numpy2_product", MODULE, "there is a fix numpy2_product already"),
        ("Lost-Momentum", MODULE, "expected a name in small letters, digits and underscores"),
        (
            NAME,
            "torch.optim",
            "expected a module of megatron.core or .* or megatron.training, found torch.optim",
        ),
        ("hook", MODULE, "expected no file of that name yet, found .*docs/hook.md"),
    ],
)
def test_what_cannot_be_created_is_an_error(name: str, module: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        new_fix.files(REPOSITORY, name, module, URL)
