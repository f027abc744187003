"""An environment of a stack. Pip installs the stack as a user does, together with this project."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# Each environment takes a few GB and stays for the next run. `make clean` removes all of them.
ENVIRONMENTS = REPOSITORY / ".stacks"


@pytest.fixture(scope="session")
def environment_of() -> Callable[[str], Path]:
    """The folder bin/ of an environment with the packages from a requirements file in this folder."""
    return _made


def _made(name: str) -> Path:
    requirements = Path(__file__).with_name(f"{name}.txt")
    digest = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:8]
    folder = ENVIRONMENTS / f"{name}-{digest}"
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--requirement", requirements], check=True)
        done.touch()
    pip = [str(python), "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", str(REPOSITORY)]
    subprocess.run(pip, check=True, env={**os.environ, "CKPT_PATCHES": "off"})
    return folder / "bin"
