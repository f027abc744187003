"""`ckpt-patches status --prove` reports whether the active fixes work in this environment, by running their demos."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_patches.demo.prove import prove, variables
from ckpt_patches.demo.run import Demonstration
from upstream import TIMEOUT, environment_for, newest, tree

pytestmark = pytest.mark.slow

# Removes the import hook from the processes that run demonstrations, and from their child processes.
WITHOUT = """
import sys
if "status" not in sys.orig_argv:
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "PatchFinder"]
"""
SKIP = "hybrid_offload_reload,hybrid_offload_resume,resume_param_groups,reshardable_padding_save,async_save_staging"


def status(package: str, *arguments: str, path: list[Path] | None = None, **env: str) -> tuple[int, Any]:
    environ = {**environment_for(tree(package, newest(package)), "hook", path or []), "CKPT_PATCHES": "warn", **env}
    command = [sys.executable, "-m", "ckpt_patches", "status", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT)
    return done.returncode, json.loads(done.stdout) if "--json" in arguments else done.stdout


def demonstrated(found: Any) -> set[str]:
    """The active fixes but for those that tests/fixes proves."""
    active = {fix["name"] for fix in found["fixes"] if fix["state"] == "active"}
    return active - {path.stem.removeprefix("test_") for path in Path(__file__).with_name("fixes").glob("test_*.py")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("package", ["megatron-core", "deepspeed"])
def test_in_its_short_form_each_demonstration_shows_its_bug_without_the_fix(package: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    _, found = status(package, "--prove", "--json", path=[tmp_path])
    assert {proof["name"] for proof in found["proofs"]} == demonstrated(found)
    assert [proof for proof in found["proofs"] if proof["result"] != "does not work"] == []


@pytest.mark.parametrize("package", ["megatron-core", "deepspeed"])
def test_each_active_fix_works(package: str) -> None:
    returncode, found = status(package, "--prove", "--json")
    assert {proof["result"] for proof in found["proofs"]} == {"works"}, found["proofs"]
    assert {proof["name"] for proof in found["proofs"]} == demonstrated(found)
    assert (returncode, found["complete"]) == (0, True)


def test_a_fix_that_is_active_by_its_text_and_does_not_work_is_said(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    returncode, found = status("megatron-core", "--prove", path=[tmp_path], CKPT_PATCHES_SKIP=SKIP)
    assert returncode == 1
    rows = [line.split() for line in found.partition("run here")[2].splitlines()]
    assert ["fully_reshardable_shift", "does", "not", "work"] in [row[:4] for row in rows]
    assert "hybrid_offload_reload" not in found.partition("run here")[2]


def test_without_it_nothing_is_run() -> None:
    returncode, found = status("megatron-core", "--json")
    assert (returncode, found["proofs"]) == (0, [])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('print(\'noise\\n{"bug": false, "found": "all of it"}\')', (False, "all of it")),
        ('print(\'{"bug": true, "found": "half of it"}\')', (True, "half of it")),
        ("import os; os.kill(os.getpid(), 9)", (None, "no outcome")),
        ("raise ValueError('no zarr')", (None, "ValueError: no zarr")),
        (
            "import os; print('{\"bug\": false, \"found\": \"' + os.environ['CUDA_VISIBLE_DEVICES'] + '\"}')",
            (False, ""),
        ),
    ],
)
def test_what_a_demonstration_says(text: str, found: tuple[bool | None, str], tmp_path: Path) -> None:
    """The outcome of a demonstration is read from its output; another demonstration beside it passes."""
    (tmp_path / "one.py").write_text(text)
    (tmp_path / "two.py").write_text('print(\'{"bug": false, "found": "it"}\')')
    shown = [Demonstration(name, tmp_path / f"{name}.py", name, ()) for name in ("one", "two")]
    environ = variables({"PATH": "", "CUDA_VISIBLE_DEVICES": "0"}, tree=None, mode="strict")
    assert prove(shown, environ) == {"one": found, "two": (False, "it")}


@pytest.mark.quick
def test_what_they_import_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from ckpt_patches.demo import deepspeed_training")
    shown = [Demonstration("one", tmp_path / "one.py", "one", ())]
    ((bug, found),) = prove(shown, variables({}, tree=None, mode="warn")).values()
    assert (bug, "No module named 'deepspeed'" in found) == (None, True)
