"""An environment of a stack, into which pip installs it as a user does, and this project with it."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# A few GB each, kept for the next run; `make clean` removes them.
ENVIRONMENTS = REPOSITORY / ".stacks"


@pytest.fixture(scope="session")
def environment_of() -> Callable[[str], Path]:
    """The folder bin/ of the environment with what a file of requirements beside this one names."""
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
