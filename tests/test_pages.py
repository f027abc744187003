"""The commands of README.md and docs/ print what the pages show. Each block marked `run` is executed unchanged.

A block is a fence of ```console run. A line that starts with `$ ` is a command; the lines after it are its output. In
the output, `…` matches any text, and a line with only `…` matches any lines. A command without output may print
anything. Each command must exit with 0. Each page has its own environment, with these variables:

    REPO         a git URL of this repository, with the files of the working tree
    TREE         a git checkout of megatron-core 0.16.1
    CHECKPOINTS  a folder with a checkpoint of a real DeepSpeed run
    OLD          a Megatron checkpoint in the format that releases before 0.16 saved
    DAMAGED      a zarr checkpoint of a real run that lost slices
    OLDER        a complete checkpoint of the same run
    FSDP         a folder with a checkpoint of torch.distributed.checkpoint
    RESHARDED    the same checkpoint on another mesh
    FSDP_DAMAGED the same checkpoint with a lost slice of one rank
    COMMIT       the commit of REPO
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

import dcp_checkpoints
import installs
import old_checkpoints
import zero_checkpoints
from ckpt_patches.audit.audit import DAMAGED, audit
from megatron_checkpoints import ZARR, written
from upstream import REPOSITORY, TIMEOUT, newest, tree

FENCE = re.compile(r"^```console run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ALL = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
PAGES = [page for page in ALL if FENCE.search(page.read_text(encoding="utf-8"))]
CORE = "0.16.1"


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    text: str
    output: str  # as on the page; empty if the page shows none


def commands(page: str) -> list[Command]:
    found = []
    for block in FENCE.findall(page):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            text, _, output = part.partition("\n")
            found.append(Command(text, output.strip("\n")))
    return found


def matches(shown: str, printed: str) -> bool:
    lines = [".*" if line == "…" else ".*".join(map(re.escape, line.rstrip().split("…"))) for line in shown.split("\n")]
    pattern = "\n".join(f"(?s:{line})" if line == ".*" else line for line in lines)
    return bool(re.fullmatch(pattern, "\n".join(line.rstrip() for line in printed.strip("\n").split("\n"))))


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.invalid")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def committed(folder: Path) -> Path:
    git(folder, "init", "--quiet")
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message", "Begin")
    return folder


@pytest.fixture
def world(tmp_path: Path) -> dict[str, str]:
    """The environment variables of the commands, with `PATH` set to an environment that has pip."""
    source = committed(installs.copy_working_tree(tmp_path / "source"))
    upstream = tmp_path / "upstream"
    shutil.copytree(tree("megatron-core", CORE) / "megatron", upstream / "megatron")
    committed(upstream)
    checkpoint = zero_checkpoints.trained(newest("deepspeed"), "stage1")["stage1"]
    shutil.copytree(checkpoint, tmp_path / "checkpoints" / "run1" / checkpoint.name)
    runs = written(ZARR)
    shutil.copytree(dcp_checkpoints.saved() / "fsdp", tmp_path / "fsdp" / "step-3")
    damaged = next(path for path in runs.raced if audit(path).verdict == DAMAGED)
    old = old_checkpoints.flattened(tmp_path / "old", {"weight": (8, 6)})[0].write(old_checkpoints.settings())
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    # As in a container: the torch, NumPy and zarr of the tests, DeepSpeed and megatron-core.
    folders = [
        sysconfig.get_path("purelib"),
        str(tree("megatron-core", CORE)),
        str(tree("deepspeed", newest("deepspeed"))),
    ]
    (site_packages / "container.pth").write_text("\n".join(folders) + "\n")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CKPT_PATCHES", "GIT_"))}
    who = {
        f"GIT_{who}_{key}": value for who in ("AUTHOR", "COMMITTER") for key, value in (("NAME", "N"), ("EMAIL", "n@n"))
    }
    return {
        **kept,
        **who,
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "REPO": f"file://{source}",
        "TREE": str(upstream),
        "CHECKPOINTS": str(tmp_path / "checkpoints" / "run1"),
        "OLD": str(old),
        "DAMAGED": str(damaged),
        "OLDER": str(runs.whole[-1]),
        "FSDP": str(tmp_path / "fsdp"),
        "RESHARDED": str(dcp_checkpoints.saved() / "hsdp"),
        "FSDP_DAMAGED": str(dcp_checkpoints.saved() / "lost_moment"),
        "COMMIT": git(source, "rev-parse", "HEAD"),
        "NO_COLOR": "1",
    }


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page(page: Path, world: dict[str, str], tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for command in commands(page.read_text(encoding="utf-8")):
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command.text],
            cwd=work,
            env=world,
            text=True,
            capture_output=True,
            timeout=TIMEOUT,
        )
        printed = done.stdout + done.stderr
        assert done.returncode == 0, f"{command.text}\n{printed}"
        printed = printed.replace(world["CHECKPOINTS"], "/checkpoints/run1").replace(world["FSDP"], "/checkpoints/fsdp")
        assert not command.output or matches(command.output, printed), (
            f"{command.text}\nshown:\n{command.output}\nprinted:\n{printed}"
        )


NOT_RUN = {
    "hugging_face": "a training's output, as `make stacks` makes it, which runs these commands",
    "explorer": "hours; the cases of its corpus and drawn ones are run by test_explore.py",
    "fingerprint": "trains with Megatron-LM's own script, which no package on the index has",
    "launchers": "srun: a cluster",
    "training_stacks": "looks at a user's checkout of Megatron-LM",
}


def test_a_block_of_commands_is_run_or_cannot_run_here() -> None:
    """Blocks without a language are commands. Each page with such blocks is listed in NOT_RUN with a reason."""
    unmarked = {page.stem for page in ALL if "" in languages(page.read_text(encoding="utf-8"))}
    assert unmarked <= NOT_RUN.keys()
    known = ("console run", "text", "python", "dockerfile")
    others = {language for page in ALL for language in languages(page.read_text(encoding="utf-8")) if language}
    assert [language for language in others if not language.startswith(known)] == []


def languages(page: str) -> set[str]:
    return set(re.findall(r"^```([^\n]*)\n.*?^```$", page, re.MULTILINE | re.DOTALL))


def test_output_is_compared() -> None:
    assert matches("a … c\n…\nend", "a b c\n1\n2\nend\n")
    assert not matches("a … c", "a b d")
    assert not matches("a", "a\nb")
    assert [c.output for c in commands("```console run\n$ one\n$ two\nout\n```\n")] == ["", "out"]
