"""The edits, the output of apply and revert, and the code that the hook runs are equal on all supported Pythons."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import upstream
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.plan import module_path
from ckpt_patches.engine.registry import PACKAGES
from installs import RUNNING, Environment, find_python, wheel
from registered import TARGETS
from small_tree import MODULE, make
from upstream import newest, once

pytestmark = pytest.mark.slow

VERSIONS = ["3.10", "3.11", "3.12", "3.13"]
SHOWS_EDITED = {version: version == "3.13" for version in VERSIONS}  # in a traceback that the interpreter itself prints
NEWEST = {"megatron-core": "0.16.1", "deepspeed": newest("deepspeed")}
OLDER = {"megatron-core": ["0.12.0", "0.14.0"], "deepspeed": ["0.15.0", "0.16.2"]}
TREES = {
    f"{distribution}-{version}": (distribution, version)
    for distribution, newest in NEWEST.items()
    for version in [*(OLDER[distribution] if upstream.all_releases() else ()), newest]
}
TARGETS_OF = {
    distribution: [module_path("", module) for module, package in TARGETS.items() if package == name]
    for name, distribution in DISTRIBUTIONS.items()
}
READ = {
    "megatron-core": ["megatron/core/__init__.py", "megatron/core/package_info.py", "*.dist-info/RECORD"],
    "deepspeed": ["deepspeed/__init__.py", "deepspeed/git_version_info_installed.py", "*.dist-info/RECORD"],
}


def tree(name: str) -> Path:
    return upstream.tree(*TREES[name])


def test_a_python_that_is_not_here_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that is not installed is not found, even if another Python has its name."""
    (tmp_path / "python3.99").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_python("3.99") is None


@dataclass(frozen=True)
class Installed:
    """The project's wheel in a fresh environment of one Python version."""

    version: str
    python: str  # the interpreter that created the environment
    environment: Environment


PYTHONS = [pytest.param(version, marks=[] if version == RUNNING else [pytest.mark.slow]) for version in VERSIONS]


@pytest.fixture(scope="module", params=PYTHONS)
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    version = request.param
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    environment = Environment.make(tmp_path_factory.mktemp(f"python-{version}") / "venv", python)
    # The pip of the environment's own Python can be too old.
    options = ("--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(environment.site_packages))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel())], check=True)
    return Installed(version, python, environment)


def check_succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"{done.args}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"
    return done.stdout


def copies(to: Path) -> list[str]:
    """Copy all files that the command reads from each tree: the target modules, the release number, the file record."""
    for name, (distribution, _) in TREES.items():
        for pattern in [*READ[distribution], *TARGETS_OF[distribution]]:
            for path in tree(name).glob(pattern):
                copy = to / name / path.relative_to(tree(name))
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    return [str(to / name) for name in TREES]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """The results of the Python that runs the tests, on the trees, from the checkout."""

    def edit(folder: Path) -> None:
        program = upstream.program_file("own_fixes")
        done = subprocess.run([sys.executable, str(program), *copies(folder)], capture_output=True, text=True)
        (folder / "found").write_text(check_succeeded(done))

    folder = once("trees-edited-from-the-checkout", edit)
    found: dict[str, Any] = without_paths((folder / "found").read_text(), folder)
    return found


def without_paths(text: str, folder: Path) -> Any:
    return json.loads(text.replace(str(folder), "FOLDER"))


def test_every_module_of_ours_compiles_without_a_warning(installed: Installed) -> None:
    packages = [str(path) for path in installed.environment.site_packages.glob("*_patches")]
    assert len(packages) == 1 + len(PACKAGES)
    check_succeeded(installed.environment.python("-W", "error", "-m", "compileall", "-q", "-f", *packages))


def test_the_trees_are_edited_alike(installed: Installed, expected: dict[str, Any], tmp_path: Path) -> None:
    """The edited trees and the messages are equal, without warnings, and revert restores the originals."""
    program = str(upstream.program_file("own_fixes"))
    done = installed.environment.python("-W", "error", program, *copies(tmp_path))
    assert done.stderr == ""
    found = without_paths(check_succeeded(done), tmp_path)
    assert found.keys() == TREES.keys()
    for name, results in found.items():
        assert results == expected[name]
        assert results["as before"]
        edited = {path for path in results["applied"] if path.startswith(("megatron/", "deepspeed/"))}
        assert edited == set(re.findall(r"^\+\+\+ b/(.*)$", results["diff"][0], re.MULTILINE))
        assert "active" in {fix["state"] for fix in results["fixes"]}


# Prints the result, the source that Python shows for the function, and a worker process's result; then raises.
IN_SMALL_TREE = f"""
import inspect, multiprocessing
from ckpt_patches.startup import verify

def work(shape):
    import {MODULE} as m
    return m.size(shape)

if __name__ == "__main__":
    import {MODULE} as m
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(work((2, 3)), inspect.getsource(m.size).splitlines()[-1].strip(), pool.map(work, [(2, 3)]))
    verify()
    m.size(None)
"""


def test_the_hook_runs_and_shows_the_edited_code(installed: Installed, tmp_path: Path) -> None:
    """The hook runs and shows the edited code in strict mode, and does nothing if off.

    It uses a small tree without torch, a worker process and a traceback. Before 3.13 the interpreter itself prints the
    lines of a traceback as they are on disk.
    """
    make(tmp_path)
    (tmp_path / "numpy.py").write_text("import math\n\nprod = math.prod\n")
    (tmp_path / "program.py").write_text(IN_SMALL_TREE)
    run = functools.partial(installed.environment.python, str(tmp_path / "program.py"), PYTHONPATH=str(tmp_path))
    strict = run(CKPT_PATCHES="strict")
    assert strict.stdout == "6 return np.prod(shape) [6]\n"
    assert strict.stderr.splitlines()[-1].startswith("TypeError")
    shown = "prod" if SHOWS_EDITED[installed.version] else "product"
    assert f"return np.{shown}(shape)" in strict.stderr
    as_main = installed.environment.python("-m", MODULE, PYTHONPATH=str(tmp_path))
    assert as_main.stdout == "True\n", as_main.stderr
    off = run(CKPT_PATCHES="off")
    assert off.stdout == ""
    assert "module 'numpy' has no attribute 'product'" in off.stderr
