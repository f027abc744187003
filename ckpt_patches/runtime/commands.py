"""What every command does around its work: a user's mistake, or an error of the system, is one line and a status."""

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

from ckpt_patches.errors import UserError, WorkerDefect, one_line
from ckpt_patches.runtime.distributed import OtherRankError

Options = TypeVar("Options")


def run(program: str, work: Callable[[], int], *, interrupted: str = "interrupted", defect: int = 2) -> int:
    """The exit status of `work`; where it fails, a line on standard error and the status for that.

    Args:
        program: what the line begins with.
        interrupted: the line after Ctrl-C.
        defect: the status for a `WorkerDefect`.
    """
    try:
        status = work()
        if sys.stdout is not None:
            sys.stdout.flush()  # a full disk is found here, and not when the interpreter ends
    except OtherRankError as error:
        return error.status
    except UserError as error:
        return _failed(program, str(error), error.status)
    except WorkerDefect as error:
        return _failed(program, str(error), defect)
    except KeyboardInterrupt:
        return _failed(program, interrupted, 130)
    except BrokenPipeError:
        _discard_output()
        return 0
    except OSError as error:
        _discard_output()
        # Only errors of files that are open already come without a name; standard output is the one that is known here.
        return _failed(program, one_line(error, "cannot write the output"), UserError.status)
    return status


def say(program: str, message: str) -> None:
    print(f"{program}: {message}", file=sys.stderr)


@contextlib.contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Imports that need a package which may not be installed.

    Raises:
        UserError: it is not; the message names it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = error.name
        raise UserError(f"{what} needs {name}, which is not installed: pip install {name}") from None


def chosen(kind: type[Options], options: argparse.Namespace) -> Options:
    """A dataclass with the values of the options that are called like its fields."""
    assert dataclasses.is_dataclass(kind)
    return kind(**{field.name: getattr(options, field.name) for field in dataclasses.fields(kind)})


def _failed(program: str, message: str, status: int) -> int:
    say(program, message)
    return status


def _discard_output() -> None:
    """If standard output cannot be written, forget what is left for it: the interpreter would try again at its end."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
