"""Exceptions and their messages. A user's mistake is one line on stderr and exit status 2, without a traceback."""

import os
from collections.abc import Iterable

from ckpt_patches import StrictModeError as StrictModeError

TRUST = "--trust-checkpoint"  # named in messages about unknown classes


class UserError(Exception):
    """A user's mistake. The message states what was expected, what was found, where, and what to do."""

    status = 2  # the exit status of a command that raises it


class NothingToDo(UserError):
    """What was asked for is there already: one line, nothing is written, and the exit status is 0."""

    status = 0


class WorkerDefect(RuntimeError):
    """An error in a worker process that is a defect of this project; the message has the traceback."""


class FingerprintError(RuntimeError):
    """The loaded state differs from the saved state."""


def unknown(what: str, name: str, known: Iterable[str], where: str) -> str:
    """One line for an unknown name: the nearest known name, or else the command that lists all names."""
    return f"no {what} {name}" + (nearest(name, known) or f"; {where} has all names")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a line about an unknown name: the nearest known name; empty if no name is close."""
    import difflib

    every = list(known)
    begun = [own for own in every if len(name) > 2 and own.startswith(name)]
    found = difflib.get_close_matches(name, every, n=1, cutoff=0.75) or (begun if len(begun) == 1 else [])
    return f"; did you mean {found[0]}?" if found else ""


def one_line(error: Exception, unnamed: str = "") -> str:
    """An error as one line. For an OSError: its file name, or `unnamed` without one, and the reason."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    where = error.filename or unnamed
    return f"{os.fsdecode(where)}: {error.strerror}" if where else error.strerror
