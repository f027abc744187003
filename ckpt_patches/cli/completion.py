"""Shell completion for `ckpt-patches`, generated from the options of its commands."""

import argparse
import re
import shlex
from collections.abc import Iterable, Mapping

SHELLS = ("bash", "zsh")
FUNCTION = "_ckpt_patches"
# zsh runs the same function through bashcompinit.
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def script(parsers: Mapping[str, argparse.ArgumentParser], words: Mapping[str, Iterable[str]], shell: str) -> str:
    """The completion script for a shell.

    Args:
        parsers: the parser of each command, by its name.
        words: by command, its arguments other than options and files, such as names of fixes.
        shell: one of `SHELLS`.
    """
    cases = [_case(name, parser, words.get(name, ())) for name, parser in parsers.items()]
    return (
        f"""{ZSH if shell == "zsh" else ""}{FUNCTION}() {{
    local word=${{COMP_WORDS[COMP_CWORD]}}
    local words
    if [ "$COMP_CWORD" -eq 1 ]; then
        words={shlex.quote(" ".join(parsers))}
    else
        case ${{COMP_WORDS[1]}} in
"""
        + "".join(cases)
        + f"""        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F {FUNCTION} ckpt-patches
"""
    )


def _case(name: str, parser: argparse.ArgumentParser, words: Iterable[str]) -> str:
    options = re.findall(r"--[a-z-]+", parser.format_usage())
    return f"            {name}) words={shlex.quote(' '.join([*options, '--help', *words]))} ;;\n"
