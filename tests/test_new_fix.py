"""`tests/new_fix.py` creates files in our style whose tests fail until the fix is written."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import new_fix
from ckpt_patches.errors import UserError
from installs import Environment, copy_working_tree, editable
from upstream import REPOSITORY, trees

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
