"""The cases that explorations have found.

Each file holds one case, the finding that the case shows, and the release that shows it. A case takes the name of a fix
if it is SILENT without that fix and not SILENT with all fixes. A case also takes the name of a fix if it is right with
all fixes and has an "error" without that fix. A case that showed a tool to be wrong takes the name of the tool. A case
that is SILENT with all fixes is named `open_…`. It fails the tests until there is a fix or an error.
"""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_patches.engine.fix import load, package_of
from ckpt_patches.engine.registry import CORE, DEEPSPEED
from ckpt_patches.runtime.durable import replace_durably
from explore.judged import SILENT, Stack, outcome
from explore.spaces import compact, complete, described
from registered import FIXES

CORPUS = Path(__file__).parent / "corpus"


def kept() -> dict[str, dict[str, Any]]:
    """All kept cases by file name. A name is the fix, plus a distinguishing detail if the fix has several cases."""
    files = {path.stem: json.loads(path.read_text()) for path in sorted(CORPUS.glob("*.json"))}
    return {name: {**known, "case": complete(known["case"])} for name, known in files.items()}


def silent_fixes(stack: Stack) -> list[str]:
    """The names of the fixes for silent bugs that affect the release."""
    package = {"deepspeed": DEEPSPEED, "megatron": CORE}[stack.package]
    mine = [load(name) for name in FIXES if package_of(name) == package]
    return [fix.name for fix in mine if fix.silent and fix.affects(stack.version)]


def causes(case: dict[str, Any], stack: Stack) -> list[str]:
    """A least set of fixes without which a case is SILENT, of those that are off; empty if it is with all fixes, too.

    Junker, QuickXplain, AAAI 2004.
    """

    @functools.cache
    def is_silent(off: tuple[str, ...]) -> bool:
        return outcome(case, replace(stack, without=",".join(off))).kind == SILENT

    def least(off: list[str], suspects: list[str]) -> list[str]:
        if is_silent(tuple(sorted(off))):
            return []
        if len(suspects) == 1:
            return suspects
        half = len(suspects) // 2
        later = least([*off, *suspects[:half]], suspects[half:])
        return [*least([*off, *later], suspects[:half]), *later]

    return least([], stack.without.split(",")) if stack.without else []


def keep(name: str, case: dict[str, Any], signature: str, stack: Stack) -> str:
    """Write a file for a case that an exploration has found. Returns the file's name."""
    file = CORPUS / f"{name}.json"
    known = {"shows": described(case), "signature": signature, "version": stack.version, "case": compact(case)}
    replace_durably(file, (json.dumps(known, indent=1) + "\n").encode())
    return file.name
