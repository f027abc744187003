"""Run `make prove` in an environment of each stack that people run, and print a line for each row as it ends.

    make stacks [ROW="verl_0.8 verl_0.9"] [KEEP=1]

Without ROW all rows; KEEP=1 leaves the environments in .stacks/. The row `hugging_face` runs the test beside this file.
Commits of Megatron-LM come from its public repository; git's option `url.<base>.insteadOf` selects another copy.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from installs import RUNNING, find_python

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENTS = REPOSITORY / ".stacks"
MEGATRON_LM = "https://github.com/NVIDIA/Megatron-LM"
NVRX = "nvidia-resiliency-ext=="
# For the build of DeepSpeed's source distribution, and what its setup imports besides torch.
FOR_DEEPSPEED = ("setuptools", "wheel", "ninja", "packaging", "py-cpuinfo", "hjson", "pydantic", "tqdm", "einops")
FOR_MEGATRON = ("einops", "packaging", "psutil", "regex", "six")  # it imports these, and requires them not always
# Wheels of nvidia-resiliency-ext require a newer glibc than many systems have. Checkpoints need no compiled code.
OF_NVRX = ("--no-deps", "--only-binary=:all:", "--python-version=3.12", "--upgrade")
PLATFORMS = tuple(f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (39, 31, 28))


class NotInstalled(RuntimeError):
    """The row has no environment, because its Python is missing or because pip or git failed."""


@dataclass(frozen=True)
class Row:
    """A stack: what a consumer's Dockerfile, lock file or submodules pin, or the nearest that pip can install."""

    python: str  # "3.12"
    requirements: str  # those of pip, separated by blanks; torch comes first
    commit: str = ""  # of Megatron-LM, 40 hexadecimal digits; in place of megatron-core


ROWS = {
    "nemo_26.04": Row("3.12", "torch==2.11.0 numpy megatron-core==0.17.0 nvidia-resiliency-ext==0.6.0"),
    "nemo_26.06": Row("3.12", "torch==2.12.0 numpy megatron-core==0.18.0 nvidia-resiliency-ext==0.6.0"),
    "bridge_0.4.2": Row("3.12", "torch==2.11.0 numpy", "2edffadb528ea07e261b0c02cdc42a7bb9c3197a"),
    "bridge_0.6.0": Row("3.12", "torch==2.12.0 numpy", "cd4afffa648426a959dc7cb1e24b5ce7d0c3ff54"),
    "bridge_main": Row("3.12", "torch==2.12.0 numpy", "2a75ac12c54ba6a42b34024756820bf819a2e25f"),  # of 2026-08-22
    # Megatron-LM is that of the Megatron-Bridge commit that it pins, in place of a fork's.
    "nemo_rl_0.5": Row(
        "3.12", "torch==2.9.0 numpy<2 zarr<3 numcodecs<0.16 tensorstore", "3cbe5c68a40c5820c11fc60fea1143dc6983706e"
    ),
    # Megatron-LM is that of Megatron-Bridge 0.5.1: the pinned commit could not be had.
    "nemo_rl_0.7": Row(
        "3.13", "torch==2.11.0 numpy>=2.1 nvidia-resiliency-ext==0.6.0", "458c8d0ecafdf6d9e36771600d62ade27f2a67b7"
    ),
    "verl_0.4": Row("3.12", "torch==2.6.0 numpy<2 megatron-core==0.12.2 zarr<3 numcodecs<0.16 tensorstore"),
    "verl_0.8": Row("3.12", "torch==2.11.0 numpy megatron-core==0.16.1"),
    "verl_0.9": Row("3.12", "torch==2.11.0 numpy megatron-core==0.18.0"),
    "skyrl": Row("3.12", "torch==2.11.0 numpy", "71e418ea7d7b3a6c9a53238c543c3e0b43e11026"),
    "openrlhf": Row("3.12", "torch==2.11.0 numpy deepspeed==0.19.5"),  # it pins no Python and no torch
    "llama_factory": Row("3.11", "torch==2.10.0 numpy deepspeed==0.18.4"),
    "newest": Row("3.13", "torch==2.15.0 numpy megatron-core==0.19.2 deepspeed==0.19.8 nvidia-resiliency-ext==0.7.0"),
}
HUGGING_FACE = Row(
    RUNNING, "torch==2.13.0 numpy deepspeed==0.19.8 accelerate==1.15.0 peft==0.21.2 transformers==5.24.0"
)


def main() -> int:
    asked = os.environ.get("ROW", "").split() or [*ROWS]
    if unknown := [name for name in asked if name not in (*ROWS, "hugging_face")]:
        print(f"expected ROW to be of {', '.join([*ROWS, 'hugging_face'])}, found {unknown[0]}", file=sys.stderr)
        return 2
    if asked == ["hugging_face"]:
        return subprocess.run([sys.executable, "-m", "pytest", str(Path(__file__).parent)]).returncode
    found = {name: result_of(name) for name in asked}
    for name, result in found.items():
        print(f"{name:14} {result or 'works'} (Python {ROWS[name].python} {ROWS[name].requirements})")
    return int(any(found.values()))


def result_of(name: str) -> str:
    """What does not work in a row, in words; "" if all works."""
    try:
        folder = make(name, ROWS[name])
        site = site_packages(folder)
        status = [sys.executable, "-m", "ckpt_patches", "status", "--tree", str(site)]
        if subprocess.run(status).returncode != 0:
            return f"no match: {' '.join(status)}"
        options = [f"SITE={site}", f"PYTHON={folder / 'bin/python'}", f"VENV={folder / 'venv'}"]
        proven = subprocess.run(["make", "prove", *options], cwd=REPOSITORY, env=variables())
        return "" if proven.returncode == 0 else "a proof failed"
    except NotInstalled as error:
        return f"not run: {error}"
    finally:
        if not os.environ.get("KEEP"):
            shutil.rmtree(ENVIRONMENTS / name, ignore_errors=True)


def make(name: str, row: Row) -> Path:
    """Make a row's environment, or reuse a complete one.

    Raises:
        NotInstalled: the row's Python is missing, or pip or git failed.
    """
    folder = ENVIRONMENTS / name
    done = folder / "installed"
    if not done.exists() or done.read_text() != str(row):
        if (python := find_python(row.python)) is None:
            raise NotInstalled(f"expected a Python {row.python} on this machine, found none")
        shutil.rmtree(folder, ignore_errors=True)
        run([python, "-m", "venv", str(folder)])
        install(folder, row)
        done.write_text(str(row))
    return folder


def install(folder: Path, row: Row) -> None:
    torch, *others = row.requirements.split()
    (folder / "constraints.txt").write_text("\n".join([torch, *others]))
    pip(folder, torch, *(one for one in others if not one.startswith(("deepspeed", NVRX))))
    if any(one.startswith("deepspeed") for one in others):
        pip(folder, *FOR_DEEPSPEED)
        pip(folder, "--no-build-isolation", *(one for one in others if one.startswith("deepspeed")))
    for nvrx in (one for one in others if one.startswith(NVRX)):
        pip(folder, *OF_NVRX, *PLATFORMS, "--target", str(site_packages(folder)), nvrx)
    if row.commit or "megatron-core" in row.requirements:
        pip(folder, *FOR_MEGATRON)
    if row.commit:
        clone = folder / "Megatron-LM"
        run(["git", "init", "--quiet", str(clone)])
        run(["git", "-C", str(clone), "fetch", "--quiet", "--depth=1", MEGATRON_LM, row.commit])
        run(["git", "-C", str(clone), "checkout", "--quiet", "FETCH_HEAD"])
        shutil.copytree(clone / "megatron", site_packages(folder) / "megatron", dirs_exist_ok=True)


def site_packages(folder: Path) -> Path:
    (found,) = folder.glob("lib/python*/site-packages")
    return found


def variables() -> Mapping[str, str]:
    """The variables of its programs: without the caller's Python and patches, and without a GPU."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CKPT_PATCHES", "MAKE"))}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}


def pip(folder: Path, *arguments: str) -> None:
    kept = ["--constraint", str(folder / "constraints.txt")]
    run([str(folder / "bin/python"), "-m", "pip", "install", "--quiet", *kept, *arguments])


def run(command: list[str]) -> None:
    done = subprocess.run(command, env=variables(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise NotInstalled(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
