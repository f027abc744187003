"""Write the tables of commands and options in docs/commands.md: `python tests/command_tables.py`."""

import argparse
import re

import generated
from ckpt_patches.cli import command_line
from ckpt_patches.convert import convert_command
from upstream import REPOSITORY

PAGE = REPOSITORY / "docs" / "commands.md"
BLOCK = "commands"
# The page of each command that has one.
GUIDES = {
    "diff": "patches.md",
    "apply": "container.md",
    "audit": "audit.md",
    "repair": "audit.md#repair",
    "fingerprint": "fingerprint.md",
    "to-universal": "ds_to_universal.md",
    "migrate": "migrate.md",
}


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, in the order of `ckpt-patches --help`."""
    found = dict(command_line._parsers()[1])
    found[command_line.TO_UNIVERSAL] = convert_command.parser(f"ckpt-patches {command_line.TO_UNIVERSAL}")
    return found


def tables() -> str:
    """A table of commands, then a table of options with the commands that have them."""
    commands = [(_called(name, parser), _purpose(parser), _exit_status(parser)) for name, parser in parsers().items()]
    by_option: dict[tuple[str, str], list[str]] = {}
    for name, parser in parsers().items():
        for action in parser._actions:
            if action.option_strings and action.dest != "help" and action.help != argparse.SUPPRESS:
                by_option.setdefault((_spelled(action), _cell(str(action.help))), []).append(name)
    options = [(option, ", ".join(by_option[option, text]), text) for option, text in sorted(by_option, key=_letters)]
    return (
        f"{generated.table(('Command', 'Purpose', 'Exit status'), commands)}\n\n"
        f"{generated.table(('Option', 'Commands', 'Purpose'), options)}"
    )


def _letters(option_and_text: tuple[str, str]) -> tuple[str, str]:
    option, text = option_and_text
    return option.replace("`", " "), text


def _called(name: str, parser: argparse.ArgumentParser) -> str:
    """The command with its arguments and required options, linked to its page."""
    words = [name]
    for action in parser._actions:
        if not action.option_strings:
            words.append(_repeated(action))
        elif action.required:
            words.append(f"{action.option_strings[0]} {action.metavar}")
    code = f"`{_cell(' '.join(words))}`"
    return f"[{code}]({GUIDES[name]})" if name in GUIDES else code


def _repeated(action: argparse.Action) -> str:
    word = str(action.metavar or " | ".join(action.choices or [action.dest]))
    return {"*": f"[{word} …]", "+": f"{word} …"}.get(str(action.nargs), word)


def _spelled(action: argparse.Action) -> str:
    value = action.metavar or "|".join(action.choices or [])
    value = f" {value}" if action.nargs != 0 and value else ""
    return ", ".join(f"`{_cell(name + value)}`" for name in action.option_strings)


def _purpose(parser: argparse.ArgumentParser) -> str:
    return _cell(str(parser.description))


def _exit_status(parser: argparse.ArgumentParser) -> str:
    """The exit status text at the end of the command's help; `0 success` without one."""
    found = re.search(r"^exit status: (.*(?:\n(?!\n).*)*)", str(parser.epilog), flags=re.MULTILINE)
    return _cell(found[1]) if found else "0 success"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    generated.write(PAGE, {BLOCK: tables()})


if __name__ == "__main__":
    main()
