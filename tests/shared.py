"""What is costly is made once a run of the tests, by whichever of its processes asks for it first."""

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
    """One of the run; the last of its processes removes it."""
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
    """The run's file or folder of that name, which `make` is given to write; nobody changes it after that.

    Others wait while it is made. What was written by a call that failed is removed, and the next to ask makes it anew.
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
