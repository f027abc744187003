"""`ckpt-patches diff --split`: each fix as a file that `git am` makes a commit of, with its test."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ckpt_patches import cli
from ckpt_patches.engine import fix as fixes
from ckpt_patches.engine.diffs import upstream_test
from ckpt_patches.engine.mails import WIDTH, plain
from ckpt_patches.engine.plan import Outcome, module_path, plan_tree
from ckpt_patches.engine.registry import CORE, DEEPSPEED, FIXES
from upstream import tree

NEWEST = {"megatron-core": ("0.19.2", CORE), "deepspeed": ("0.19.8", DEEPSPEED)}


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of somebody's, without upstream's code yet."""
    made = tmp_path / "checkout"
    made.mkdir()
    git(made, "init", "--quiet")
    git(made, "config", "user.name", "Zoë Å")
    git(made, "config", "user.email", "zoe@example.org")
    return made


def put(release: str, to: Path) -> str:
    """The release's modules that fixes edit, committed; its package."""
    version, package = NEWEST[release]
    root = tree(release, version)
    for module in {module for modules in FIXES.values() for module in modules}:
        source, target = Path(module_path(str(root), module)), Path(module_path(str(to), module))
        if source.exists() and module.startswith(f"{package}."):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    git(to, "add", "--all")
    git(to, "commit", "--quiet", "--message", "Begin")
    return package


@pytest.mark.parametrize("release", NEWEST)
def test_git_makes_a_commit_of_each_fix_with_its_test(release: str, checkout: Path, tmp_path: Path) -> None:
    package, patches = put(release, checkout), tmp_path / "patches"
    names = [name for name in FIXES if fixes.package_of(name) == package]
    status = cli.main(["diff", *names, "--split", str(patches), "--tree", str(checkout)])
    assert status == 0
    applied = plan_tree(str(checkout), package).named(Outcome.APPLIES)
    assert len(applied) > 5
    assert sorted(path.stem for path in patches.iterdir()) == sorted(applied)
    begin = git(checkout, "rev-parse", "HEAD")
    for name in applied:
        made = plan_tree(str(checkout), package, [name], for_upstream=True)
        git(checkout, "am", str(patches / f"{name}.patch"))
        files = {os.path.relpath(file.path, checkout): file.patched for file in made.files.values()}
        files |= [upstream_test(package, name)]
        assert git(checkout, "diff", "--name-only", "HEAD~1").splitlines() == sorted(files)
        assert {path: (checkout / path).read_bytes() for path in files} == files
        author, subject, *message = git(checkout, "log", "-1", "--format=%an <%ae>%n%B").splitlines()
        assert author == "Zoë Å <zoe@example.org>"
        assert f"{subject}." == fixes.sentence(name)
        assert "Symptom:" in message
        assert f"See {fixes.load(name).upstream[0]}" in message
        assert not re.search(r"ckpt-patches|\]\(", "\n".join(message))
        git(checkout, "reset", "--quiet", "--hard", begin)


def test_a_paragraph_is_wrapped_and_what_is_laid_out_stays() -> None:
    long = "word " * 40
    laid_out = ["    code  is code", "| a | b |\n|---|---|", "- a list\n- of two", "1. one\n2. two"]
    first, *rest = plain("\n\n".join([f"See [the page](hook.md), [it](https://a.b/c). {long}", *laid_out])).split(
        "\n\n"
    )
    assert rest == laid_out
    assert first.startswith("See the page, it (https://a.b/c). word")
    assert max(map(len, first.splitlines())) <= WIDTH


def test_what_holds_for_the_fix_in_a_release_is_not_said_to_upstream() -> None:
    assert (
        plain("It is so.\n\nRanks agree; the diff for upstream has no such check.\n\nAnd so.") == "It is so.\n\nAnd so."
    )


def test_nobody_is_made_the_author(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put("deepspeed", checkout)
    git(checkout, "config", "--unset", "user.email")
    git(checkout, "config", "user.useConfigOnly", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "EMAIL"):
        monkeypatch.delenv(name, raising=False)
    split = ["--split", str(tmp_path / "patches"), "--tree", str(checkout)]
    assert cli.main(["diff", "zero3_universal_groups", *split]) == 2
    assert "set git's user.name and user.email" in capsys.readouterr().err
    assert not list((tmp_path / "patches").glob("*"))
