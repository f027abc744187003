"""`ckpt-patches new-fix`: it makes files that fail until somebody has written the fix, in our own style."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_patches import cli, new_fix
from ckpt_patches.engine.registry import FIXES
from ckpt_patches.errors import UserError
from installs import copy_working_tree
from upstream import REPOSITORY

NAME, URL = "lost_momentum", "https://github.com/someone/something/issues/1"
MODULES = {"megatron": "megatron.core.optimizer.optimizer", "deepspeed": "deepspeed.runtime.engine"}
FOLDERS = {"megatron": "megatron/patches", "deepspeed": "deepspeed_patches"}
MODULE = MODULES["megatron"]


def inside(clone: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command of Python with the clone's own code."""
    env = {**os.environ, "PYTHONPATH": str(clone), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, "-m", *command], cwd=clone, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("package", MODULES)
def test_the_files_of_a_fix_are_made_in_our_style_and_its_tests_fail(package: str, tmp_path: Path) -> None:
    clone = copy_working_tree(tmp_path / "clone")
    done = inside(clone, "ckpt_patches", "new-fix", NAME, "--module", MODULES[package], "--upstream", URL)
    assert (done.returncode, done.stderr) == (0, "")
    folder = FOLDERS[package]
    made = {f"{folder}/{NAME}.py", f"{folder}/upstream_tests/test_{NAME}.py", f"docs/{NAME}.md"}
    made |= {f"tests/test_{NAME}.py", f"tests/programs/{NAME}.py", new_fix.REGISTRY, new_fix.CHANGES}
    assert set(done.stdout.partition("\n\n")[0].splitlines()) == made
    for style in (["check"], ["format", "--check"]):
        checked = inside(clone, "ruff", *style, ".")
        assert checked.returncode == 0, checked.stdout

    tests = inside(clone, "pytest", "-q", "-p", "no:cacheprovider", f"tests/test_{NAME}.py")
    assert tests.returncode == 1
    assert "write what users do" in tests.stdout
    assert " passed" not in tests.stdout.splitlines()[-1]
    missing = inside(clone, "pytest", "-q", "-p", "no:cacheprovider", "tests/test_every_fix.py", "-k", NAME)
    assert f"test_a_fix_has_its_file_page_tests_and_change_log_line[{NAME}]" in missing.stdout  # README.md has it not

    again = inside(clone, "ckpt_patches", "new-fix", NAME, "--module", MODULES[package], "--upstream", URL)
    assert (again.returncode, again.stderr) == (2, f"ckpt-patches: there is a fix {NAME} already\n")


@pytest.mark.parametrize(
    ("root", "name", "module", "message"),
    [
        (REPOSITORY, "numpy2_product", MODULE, "there is a fix numpy2_product already"),
        (REPOSITORY, "Lost-Momentum", MODULE, "expected a name in small letters, digits and underscores"),
        (REPOSITORY, NAME, "torch.optim", "expected a module of megatron.core or deepspeed, found torch.optim"),
        (REPOSITORY, "hook", MODULE, "expected no file of that name yet, found .*docs/hook.md"),
        (Path("/usr"), NAME, MODULE, "expected a clone of this repository, found /usr: install it with pip install -e"),
    ],
)
def test_what_cannot_be_made_is_said(root: Path, name: str, module: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        new_fix.files(root, name, module, URL)


def test_nothing_is_written_where_one_of_the_files_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["new-fix", "hook", "--module", MODULE, "--upstream", URL]) == 2
    assert "docs/hook.md" in capsys.readouterr().err
    assert "hook" not in FIXES
    assert not (REPOSITORY / "tests" / "programs" / "hook.py").exists()
