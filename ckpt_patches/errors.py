"""A user's mistake: one clear line on stderr and exit status 2, no stack trace."""

import os
from collections.abc import Iterable

TRUST = "--trust-checkpoint"  # the option that messages about classes name


class UserError(Exception):
    """What was expected, what was found, where, and what to do."""

    status = 2  # the exit status of a command that raises it


class WorkerDefect(RuntimeError):
    """A worker process met an error that is a defect of this project; its traceback is in the message."""


class FingerprintError(RuntimeError):
    """The state after a load is not what was saved."""


def unknown(what: str, name: str, known: Iterable[str], where: str) -> str:
    """One line for a name that does not exist: the nearest one that does, and the command that has them all."""
    return f"no {what} {name}" + (nearest(name, known) or f"; {where} has all names")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a line about a name that does not exist: the nearest one that does; empty if none is near."""
    import difflib

    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def one_line(error: Exception, unnamed: str = "") -> str:
    """An error for people; of an OSError the file, or what stands for it if it has none, and the reason."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    where = error.filename or unnamed
    return f"{os.fsdecode(where)}: {error.strerror}" if where else error.strerror


class StrictModeError(RuntimeError):
    """With `CKPT_PATCHES=strict`, a program in which a fix that is needed does not run is stopped.

    Not an ImportError: `try: import megatron.core … except ImportError` is how others ask whether Megatron is there.
    """
