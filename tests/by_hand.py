"""The command that runs a test's program again, to copy into a shell at the repository root."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

ran: list[str] = []  # commands of the current test, in order


def note(argv: Sequence[str | Path], environment: Mapping[str, str]) -> None:
    """Record a program that a test runs."""
    ran.append(command(argv, environment))


def command(argv: Sequence[str | Path], environment: Mapping[str, str]) -> str:
    """The command line, with the variables that a test set or unset; paths in the repository are relative."""
    changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    unset = [f"-u {name}" for name in sorted(os.environ.keys() - environment.keys())]
    variables = [f"{name}={shlex.quote(_relative(value))}" for name, value in sorted(changed.items())]
    words = [shlex.quote(_relative(str(word))) for word in argv]
    return " ".join(["env", *unset, *variables, _relative(sys.executable), *words])


def _relative(text: str) -> str:
    """One path, or several joined by `os.pathsep`; paths in the repository become relative."""
    return os.pathsep.join(one.removeprefix(f"{REPOSITORY}{os.sep}") for one in text.split(os.pathsep))
