"""A tree with small modules that have targets' names, for tests of the engine that need no real package.

The modules call `np.product`, which the fix numpy2_product replaces by `np.prod`. Other files that fixes read are
copied from the release with all fixes applied, so that no fix reports them as missing.
"""

import contextlib
import fcntl
import functools
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping
from pathlib import Path

from ckpt_patches.engine.plan import module_path, plan_tree
from ckpt_patches.engine.registry import CORE
from upstream import TIMEOUT
from upstream import tree as tree_of_release

MODULE = "megatron.core.dist_checkpointing.exchange_utils"
SECOND = "megatron.core.dist_checkpointing.mapping"
UPSTREAM = """import numpy as np


def size(shape):
    return np.product(shape)


if __name__ == "__main__":
    print("prod" in size.__code__.co_names)
"""
RELEASE = "0.14.0"
PACKAGE_INFO = "MAJOR = 0\nMINOR = 14\nPATCH = 0\nPRE_RELEASE = ''\n"


def make(root: Path, text: str | bytes = UPSTREAM) -> Path:
    """Write the tree; return the module's path."""
    path = root.joinpath(*MODULE.split(".")).with_suffix(".py")
    for name, data in _others().items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "megatron/core/__init__.py").touch()
    (root / "megatron/core/package_info.py").write_text(PACKAGE_INFO)
    (root / "megatron/core/dist_checkpointing/__init__.py").touch()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@functools.cache
def _others() -> dict[str, bytes]:
    """The other targets' files, with all fixes applied, by path in the tree."""
    root = str(tree_of_release("megatron-core", RELEASE))
    made = plan_tree(root, CORE)
    paths = {module: module_path(root, module) for module in made.texts}
    return {
        os.path.relpath(path, root): made.files[module].patched if module in made.files else Path(path).read_bytes()
        for module, path in paths.items()
        if module != MODULE and os.path.exists(path)
    }


def make_two(root: Path) -> tuple[Path, Path]:
    """Write the tree with two modules that one fix edits; return their paths."""
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
    stdout: int = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:
    """Run this Python with the tree first on its path and capture its output; `through` wraps the command."""
    inherited = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("CKPT_PATCHES", "PYTHON", "RANK", "COLUMNS", "NO_COLOR"))
    }
    return subprocess.run(
        through(sys.executable, *arguments),
        env={**inherited, "PYTHONPATH": str(tree), **(env or {})},
        text=True,
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=check,
        cwd=cwd,
        timeout=TIMEOUT,
    )


# Prints whether the loaded function is the edited one.
IS_PATCHED = f"import {MODULE} as m; print('prod' in m.size.__code__.co_names)"
IS_PATCHED_SECOND = IS_PATCHED.replace(MODULE, SECOND)


def command(*arguments: str, on: Path = Path("/"), **env: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "ckpt_patches", *arguments, tree=on, env=env, check=False)


def on_terminal(*arguments: str, on: Path = Path("/"), columns: int, **env: str) -> str:
    """The command's output on a terminal with this many columns."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    python("-m", "ckpt_patches", *arguments, tree=on, env=env, check=False, stdout=other)
    os.close(other)
    shown = b""
    with contextlib.suppress(OSError):  # at the end, after the other side is closed
        while part := os.read(main, 1 << 16):
            shown += part
    os.close(main)
    return shown.decode().replace("\r\n", "\n")


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    return line
