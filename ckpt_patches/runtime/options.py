"""Options that several commands share."""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from ckpt_patches.errors import TRUST, nearest

MANY = "the processors, at most 16; under torchrun, divided among the ranks of a host"


class Help(argparse.HelpFormatter):
    """Wraps paragraphs at the terminal's width; keeps the lines of examples, which are indented."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(self._wrapped(part, width) for part in text.split("\n\n"))

    @staticmethod
    def _wrapped(text: str, width: int) -> str:
        return text if "\n  " in text else textwrap.fill(text, width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """A parser with usage errors of one line; raises OSError if the help cannot be written, which argparse ignores."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.partition(' ')[0]}: {' '.join(message.splitlines())} ({self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse unknown arguments here: argparse leaves them to the main parser, which lacks a command's options.

        And empty ones: an empty path would be the current folder.
        """
        if "" in (args if args is not None else sys.argv):
            self.error("expected an argument, found an empty one: is a variable not set?")
        found, left = super().parse_known_args(args, namespace)
        for argument in left:
            name = argument.partition("=")[0]
            if name.startswith("-"):
                self.error(f"no option {name}{nearest(name, self._option_string_actions)}")
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        if action.nargs == argparse.PARSER:
            raise argparse.ArgumentError(None, f"no command {value}{nearest(str(value), action.choices)}")
        expected = " or ".join(map(str, action.choices))
        raise argparse.ArgumentError(action, f"expected {expected}, found {value}")

    def _print_message(self, message: str, file: Any = None) -> None:
        file = file or sys.stderr
        if message and file is not None:
            file.write(message)
            file.flush()


def described(text: str, *examples: str, after: str = "") -> dict[str, Any]:
    """Keyword arguments of a command's parser: its description, examples, and a text after these."""
    lines = "\n".join(["example:" if len(examples) == 1 else "examples:", *(f"  {example}" for example in examples)])
    return {"description": text, "epilog": f"{lines}\n\n{after}".strip(), "formatter_class": Help}


def spelled(arguments: Sequence[str]) -> list[str]:
    """Replace underscores by dashes in option names; upstream's converter has options with underscores."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    return [*map(_with_dashes, arguments[:end]), *arguments[end:]]


def _with_dashes(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else argument


def add_trust(command: argparse.ArgumentParser) -> None:
    text = "accept classes that are not on the list of known ones; their code is never run"
    command.add_argument(TRUST, action="store_true", help=text)


def add_workers(
    command: argparse.ArgumentParser, *other_names: str, default: int | None = None, many: str = ""
) -> None:
    """`many`: the default number, in words."""
    names, text = ("--workers", *other_names), f"processes (default: {many or default})"
    command.add_argument(*names, dest="workers", type=positive, default=default, metavar="N", help=text)


def add_distributed(command: argparse.ArgumentParser) -> None:
    text = (
        "share the work with all ranks (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or not (default: under torchrun)"
    )
    command.add_argument("--distributed", action=argparse.BooleanOptionalAction, help=text)


def positive(text: str) -> int:
    """Parse a number of processes."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a number of processes, found {text!r}")
    return int(text)
