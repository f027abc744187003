"""The environment of a row: a virtual environment with the packages that a user of the stack installs.

Commits of Megatron-LM come from its public repository, like the submodule that its users have. Git's option
`url.<base>.insteadOf` selects another copy of the repository: https://git-scm.com/docs/git-config.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from installs import copy_working_tree, find_python
from stacks.rows import MEGATRON_LM, Row

REPOSITORY = Path(__file__).resolve().parents[2]
# Each environment takes a few GB. The run of a row removes its environment at the end, unless the user keeps it.
ENVIRONMENTS = REPOSITORY / ".stacks"
# The test programs import these packages, or the build of DeepSpeed's source distribution needs them.
FOR_TESTS = (
    "pytest>=8",
    "hypothesis>=6",
    "psutil",
    "setuptools",
    "wheel",
    "ninja",
    "packaging",
    "einops",
    "six",
    "regex",
)
SET_UP = ("py-cpuinfo", "hjson", "pydantic", "tqdm")  # DeepSpeed's setup imports these besides torch
# Wheels of nvidia-resiliency-ext require a newer glibc than many systems have. Checkpoints need no compiled code.
NVRX = "nvidia-resiliency-ext"
NVRX_OPTIONS = ("--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_39_x86_64")
NVRX_PLATFORMS = ("--platform=manylinux_2_31_x86_64", "--platform=manylinux_2_28_x86_64")
LINES = 30  # the number of lines to keep from a command's output


class NotInstalled(RuntimeError):
    """The row has no environment, because its Python is missing or because pip or git failed."""


@dataclass(frozen=True)
class Environment:
    """The environment of a row."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def checkout(self) -> Path:
        """Megatron-LM at the row's commit, if it has one."""
        return self.folder / "Megatron-LM"

    @property
    def constraints(self) -> Path:
        """The requirements that later steps of pip must not change: the row's torch and its other requirements."""
        return self.folder / "constraints.txt"

    @property
    def site_packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def variables(self) -> dict[str, str]:
        """The variables of its programs. They drop the caller's Python and patches, and put a checkout on the path."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST_", "CKPT_PATCHES"))}
        return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


@contextmanager
def locked(row: Row) -> Iterator[None]:
    """Allow only one run of a row at a time."""
    ENVIRONMENTS.mkdir(exist_ok=True)
    with open(ENVIRONMENTS / f".{row.name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(row: Row) -> Environment:
    """Make a row's environment, or reuse a kept one. Install this project again, as a wheel.

    Raises:
        NotInstalled: The row's Python is missing, pip or git failed, or the installed packages do not match the row.
    """
    digest = hashlib.sha256(f"{row}{FOR_TESTS}".encode()).hexdigest()[:8]
    environment = Environment(ENVIRONMENTS / f"{row.name}-{digest}")
    done = environment.folder / "installed"
    if not done.exists():
        try:
            _install(row, environment)
        except NotInstalled:
            remove(environment)
            raise
        done.touch()
    wheel = _wheel(environment)
    extra = "[megatron]" if _needs_zarr(row) else ""
    _pip(environment, ["--force-reinstall", "--no-deps", str(wheel)])
    if extra:
        _pip(environment, [f"{wheel}{extra}"])
    check(row, environment)
    return environment


def check(row: Row, environment: Environment) -> None:
    """Raise NotInstalled unless the environment meets each requirement of the row."""
    there = metadata.distributions(path=[str(environment.site_packages)])
    versions = {canonicalize_name(one.name): one.version for one in there}
    for requirement in map(Requirement, row.requirements):
        found = versions.get(canonicalize_name(requirement.name), "none")
        if found == "none" or not requirement.specifier.contains(found, prereleases=True):
            raise NotInstalled(f"expected {requirement} in the environment, found {found}")


def remove(environment: Environment) -> None:
    shutil.rmtree(environment.folder, ignore_errors=True)


def _needs_zarr(row: Row) -> bool:
    """Whether the row has zarr checkpoints: megatron-core before 0.16, and commits before 0.16.0, have them."""
    return bool(row.megatron) and tuple(map(int, row.megatron_release.split("."))) <= (0, 16, 0)


def _install(row: Row, environment: Environment) -> None:
    python = find_python(row.python)
    if python is None:
        raise NotInstalled(f"expected a Python {row.python} on this machine, found none")
    shutil.rmtree(environment.folder, ignore_errors=True)
    # Rows share one installation of torch, to save gigabytes and minutes. Pip replaces files and never edits them.
    shutil.copytree(_base(row, python), environment.folder, symlinks=True, copy_function=os.link)
    torch = f"torch=={row.torch}"
    environment.constraints.write_text("\n".join([torch, *row.others]))
    numpy = [] if any(one.startswith("numpy") for one in row.others) else ["numpy"]
    _pip(environment, [torch, *numpy, *row.others])
    if row.is_commit:
        checkout(row.megatron, environment.checkout)
    elif row.megatron:
        _pip(environment, [f"megatron-core=={row.megatron}"])
    if row.deepspeed:
        _pip(environment, SET_UP)
        _pip(environment, ["--no-build-isolation", f"deepspeed=={row.deepspeed}"], {"DS_BUILD_OPS": "0"})
    if row.nvrx:
        target = ("--no-deps", "--target", str(environment.site_packages))
        _pip(environment, [*target, *NVRX_OPTIONS, *NVRX_PLATFORMS, f"{NVRX}=={row.nvrx}"])


def _base(row: Row, python: str) -> Path:
    """An environment that has only a row's torch and the packages that the tests need."""
    base = Environment(_base_folder(row))
    done = base.folder / "installed-torch"
    if not done.exists():
        _run([python, "-m", "venv", "--clear", str(base.folder)])
        _pip(base, [f"torch=={row.torch}", *FOR_TESTS])
        done.touch()
    return base.folder


def _base_folder(row: Row) -> Path:
    return ENVIRONMENTS / f"base-{row.python}-{row.torch}"


def remove_bases(rows: Iterable[Row]) -> None:
    for row in rows:
        shutil.rmtree(_base_folder(row), ignore_errors=True)


def checkout(commit: str, folder: Path) -> None:
    """The files of a commit of Megatron-LM.

    Raises:
        NotInstalled: Git could not fetch the commit.
    """
    shutil.rmtree(folder, ignore_errors=True)
    _run(["git", "init", "--quiet", str(folder)])
    _run(["git", "-C", str(folder), "fetch", "--quiet", "--depth=1", MEGATRON_LM, commit])
    _run(["git", "-C", str(folder), "checkout", "--quiet", "FETCH_HEAD"])


def _wheel(environment: Environment) -> Path:
    """The wheel of the working tree. The build uses a copy of the files that git would commit."""
    folder = environment.folder / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        source = copy_working_tree(Path(temporary, "source"))
        _run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(source)])
    (built,) = folder.glob("*.whl")
    return built


def _pip(environment: Environment, arguments: Sequence[str], more: Mapping[str, str] | None = None) -> None:
    kept = ["--constraint", str(environment.constraints)] if environment.constraints.exists() else []
    command = [str(environment.python), "-m", "pip", "install", "--quiet", "--no-compile", *kept, *arguments]
    _run(command, {**environment.variables(), **(more or {})})


def _run(command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stdout.splitlines() if not line.startswith("WARNING")]
        print("\n".join(lines[-LINES:]), file=sys.stderr)
        why = next((line for line in reversed(lines) if "Error: " in line), lines[-1] if lines else "no word")
        raise NotInstalled(f"{Path(command[0]).name} {' '.join(command[1:4])}: {why}")
