"""Error handling of all commands: a user's mistake or a system error is one line and an exit status."""

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator

from ckpt_patches.errors import NothingToDo, UserError, WorkerDefect, one_line
from ckpt_patches.runtime.shown import printable_lines
from ckpt_patches.runtime.terminal import Output, filled


def run(program: str, work: Callable[[], int], *, interrupted: str = "interrupted", defect: int = 2) -> int:
    """Run `work` and return its exit status; if it fails, print a line to stderr and return the error's status.

    Args:
        program: the prefix of the line.
        interrupted: the text of the line after Ctrl-C.
        defect: the status for a `WorkerDefect`.
    """
    _open_closed_streams()
    try:
        status = work()
        if sys.stdout is not None:
            sys.stdout.flush()  # detect a full disk here, and not at the interpreter's exit
    except UserError as error:
        return _failed(program, str(error), error.status)
    except WorkerDefect as error:
        return _failed(program, str(error), defect)
    except KeyboardInterrupt:
        return _failed(program, interrupted, 130)
    except BrokenPipeError:
        _discard_output()
        return 128 + signal.SIGPIPE  # as a shell reports it: `audit | head -1 && resume` must not go on
    except ModuleNotFoundError as error:
        name = str(error.name)
        if name.startswith("ckpt_patches"):
            raise
        return _failed(program, f"needs {name}, which is not installed: pip install {name}", UserError.status)
    except OSError as error:
        _discard_output()
        # Only errors of files that are already open have no file name; here, that file is standard output.
        return _failed(program, one_line(error, "cannot write the output"), UserError.status)
    return status


def _open_closed_streams() -> None:
    """Write to nowhere what goes to a closed stream: `print` would write it to the other one, or fail."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the rest of the process


def say(program: str, message: str) -> None:
    print(filled(f"{program}: {printable_lines(message)}", sys.stderr), file=sys.stderr)


@contextlib.contextmanager
def told_as_json(schema: int, as_json: bool) -> Iterator[None]:
    """A context for work that can find nothing to do: with `as_json`, standard output says so, too."""
    try:
        yield
    except NothingToDo as error:
        if as_json:
            print(json.dumps({"schema": schema, "output": None, "nothing_to_do": str(error)}, indent=1))
        raise


def note(program: str, message: str) -> None:
    """Say what is no result and no error: not with --quiet."""
    if not Output.quiet:
        say(program, message)


def _failed(program: str, message: str, status: int) -> int:
    if not message:  # rank 0 has it
        return status
    if Output.verbose:
        traceback.print_exc()
    say(program, message)
    return status


def _discard_output() -> None:
    """If standard output cannot be written, drop its buffer: the interpreter would write it again at its exit."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
