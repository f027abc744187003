"""A tree with small modules of targets' names: for tests of the engine, where a real package would say no more.

They call `np.product`, which the fix numpy2_product turns into `np.prod`.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

MODULE = "megatron.core.dist_checkpointing.exchange_utils"
SECOND = "megatron.core.dist_checkpointing.mapping"
UPSTREAM = """import numpy as np


def size(shape):
    return np.product(shape)


if __name__ == "__main__":
    print("prod" in size.__code__.co_names)
"""
PACKAGE_INFO = "MAJOR = 0\nMINOR = 14\nPATCH = 0\nPRE_RELEASE = ''\n"


def make(root: Path, text: str | bytes = UPSTREAM) -> Path:
    """Write the tree; the module's path."""
    path = root.joinpath(*MODULE.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True)
    (root / "megatron/core/__init__.py").touch()
    (root / "megatron/core/package_info.py").write_text(PACKAGE_INFO)
    (root / "megatron/core/dist_checkpointing/__init__.py").touch()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def make_two(root: Path) -> tuple[Path, Path]:
    """Write the tree with two modules that one fix edits; their paths."""
    first = make(root)
    second = root.joinpath(*SECOND.split(".")).with_suffix(".py")
    second.write_text(UPSTREAM)
    return first, second


def python(
    *arguments: str,
    tree: Path,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    cwd: Path | None = None,
    through: Callable[..., list[str]] = lambda *command: list(command),
) -> subprocess.CompletedProcess[str]:
    """Run this Python with the tree first on its path, by the command that `through` makes of it; output captured."""
    inherited = {k: v for k, v in os.environ.items() if k != "RANK" and not k.startswith(("CKPT_PATCHES", "PYTHON"))}
    return subprocess.run(
        through(sys.executable, *arguments),
        env={**inherited, "PYTHONPATH": str(tree), **(env or {})},
        text=True,
        capture_output=True,
        check=check,
        cwd=cwd,
        timeout=60,
    )


# Prints whether the function that runs is the edited one.
IS_PATCHED = f"import {MODULE} as m; print('prod' in m.size.__code__.co_names)"
IS_PATCHED_SECOND = IS_PATCHED.replace(MODULE, SECOND)
