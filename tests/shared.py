"""Create costly files once per test run, in the test process that needs them first."""

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


@functools.cache
def folder() -> Path:
    """The shared folder of the test run; the last of its processes removes it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    path = Path(tempfile.gettempdir(), f"ckpt-patches-{run}")
    path.mkdir(mode=0o700, exist_ok=True)
    users = open(path / ".users", "w")  # noqa: SIM115  it is open as long as the process uses the folder
    fcntl.flock(users, fcntl.LOCK_SH)

    def leave() -> None:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)

    atexit.register(leave)
    return path


def once(name: str, make: Callable[[Path], object]) -> Path:
    """The test run's file or folder of that name, which `make` writes on first use; read-only afterwards.

    Other processes wait meanwhile. If `make` fails, its output is removed, and the next caller tries again.
    """
    path, done = folder() / name, folder() / f".{name}.done"
    if not done.exists():
        with open(folder() / f".{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                try:
                    make(path)
                except BaseException:
                    remove(path)
                    raise
                done.touch()
    return path


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
