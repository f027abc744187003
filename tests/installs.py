"""Virtual environments in which tests install the project, also with other Python versions."""

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from upstream import REPOSITORY, once

SHOW_HOOK = "import sys; print([type(finder).__name__ for finder in sys.meta_path])"
PTH = "training_checkpoint_patches.pth"
# The folder in the working tree of each installed package.
PACKAGES = {
    "apex_patches": "apex_patches",
    "ckpt_patches": "ckpt_patches",
    "deepspeed_patches": "deepspeed_patches",
    "megatron_patches": "megatron/patches",
    "nvrx_patches": "nvrx_patches",
    "torch_patches": "torch_patches",
}
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
# Other packages use this check to detect Megatron.
IS_MEGATRON_THERE = "import importlib.util; print(importlib.util.find_spec('megatron'))"


@functools.cache
def find_python(version: str) -> str | None:
    """A Python of this version: the running one, one on PATH, or pyenv's (whose shims on PATH may fail)."""
    if version == RUNNING:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    candidates = [shutil.which(f"python{version}"), *map(str, pyenv.glob(f"{version}.*/bin/python"))]
    return next((candidate for candidate in candidates if candidate and is_python(candidate, version)), None)


def is_python(candidate: str, version: str) -> bool:
    """Whether this is an interpreter of that version that can create virtual environments."""
    program = "import sys, venv; print(*sys.version_info[:2], sep='.')"
    done = subprocess.run([candidate, "-I", "-c", program], capture_output=True, text=True)
    return (done.returncode, done.stdout.strip()) == (0, version)


def without_roots_rights(*command: str) -> list[str]:
    """The command, bound by file permissions also as root; skip the test if root cannot drop that right."""
    if os.geteuid() != 0:
        return list(command)
    dropped = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"]
    if shutil.which(dropped[0]) is None or subprocess.run([*dropped, "true"], capture_output=True).returncode != 0:
        pytest.skip("root may write everywhere, and cannot give that right up here")
    return [*dropped, *command]


class Environment:
    """A virtual environment; it uses this Python's pip, setuptools and wheel while pip runs."""

    def __init__(self, folder: Path) -> None:
        """Use an existing one."""
        self.folder = folder
        self.executable = folder / "bin" / "python"
        (self.site_packages,) = folder.glob("lib/python*/site-packages")
        self.tools = folder / "tools"

    @classmethod
    def make(cls, folder: Path, python: str = sys.executable) -> "Environment":
        """Create a new, empty one."""
        subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
        made = cls(folder)
        made.tools.mkdir()
        installed = Path(sysconfig.get_path("purelib"))
        for pattern in ("pip", "setuptools*", "wheel*", "packaging", "pkg_resources", "_distutils_hack"):
            for path in installed.glob(pattern):
                (made.tools / path.name).symlink_to(path)
        return made

    def copy(self, folder: Path) -> "Environment":
        """A copy with the same packages; the programs in its bin/ still use this environment."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Environment(folder)

    def python(self, *args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """Run its Python with `env`, without other variables of Python, pytest or this project."""
        return self._run(args, cwd or self.folder, env)

    def _run(self, args: Sequence[str], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST_", "CKPT_PATCHES"))}
        return subprocess.run(
            [str(self.executable), *args], cwd=cwd, env={**kept, **env}, text=True, capture_output=True
        )

    def pip(self, *args: str, **env: str) -> None:
        lent = {"PYTHONPATH": str(self.tools), "CKPT_PATCHES": "off"}
        done = self._run(["-m", "pip", *args], self.folder, {**lent, **env})
        assert done.returncode == 0, f"pip {' '.join(args)}:\n{done.stdout}\n{done.stderr}"

    def install(self, *args: str, **env: str) -> None:
        self.pip("install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", *args, **env)

    def finds_megatron(self, path: str = "") -> bool:
        """Whether `importlib.util.find_spec("megatron")` finds something."""
        done = self.python("-c", IS_MEGATRON_THERE, PYTHONPATH=path)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout != "None\n"

    def files(self) -> list[str]:
        """Every file and folder of site-packages and bin."""
        tops = (self.site_packages, self.folder / "bin")
        return sorted(str(path.relative_to(self.folder)) for top in tops for path in top.rglob("*"))

    def hook(self) -> str:
        """The finders in sys.meta_path of a plain `python -c`, after checking that stderr is empty."""
        done = self.python("-c", SHOW_HOOK)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout


def copy_working_tree(folder: Path) -> Path:
    """Copy tracked and new files of the working tree, without ignored ones."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (REPOSITORY / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    return folder


def wheel() -> Path:
    """The wheel of the working tree, built once per test run in an empty folder."""
    (built,) = once("wheel", _build_wheel).glob("*.whl")
    return built


def _build_wheel(folder: Path) -> None:
    folder.mkdir()
    builder = Environment.make(folder / "venv")
    source = copy_working_tree(folder / "source")
    builder.pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(source))


def installed() -> Environment:
    """An environment with the wheel, created once per test run; read-only."""
    return Environment(once("installed", lambda folder: Environment.make(folder).install(str(wheel()))))
