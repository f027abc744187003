"""The cases that explorations have found.

Each file holds one case, the finding that the case shows, and the release that shows it. A case takes the name of a fix
if it is SILENT without that fix and not SILENT with all fixes. A case also takes the name of a fix if it is right with
all fixes and has an "error" without that fix. A case that showed a tool to be wrong takes the name of the tool. A case
that is SILENT with all fixes is named `open_…`. It fails the tests until there is a fix or an error.
"""

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


def keep(name: str, case: dict[str, Any], stack: Stack) -> str:
    """Keep the case that an exploration has found, and describe the result in words."""
    on = replace(stack, fixes=True, without="")
    with_all = outcome(case, on)
    if with_all.kind == SILENT:
        return _kept(f"open_{name}", case, with_all.signature, stack)
    for fix in silent_fixes(stack):
        without = outcome(case, replace(on, without=fix))
        if without.kind == SILENT:
            return _kept(fix, case, without.signature, stack)
    return "not kept: right without any one of the fixes"


def _kept(name: str, case: dict[str, Any], signature: str, stack: Stack) -> str:
    file = CORPUS / f"{name}.json"
    if file.exists():
        return f"not kept: there is {file.name} already"
    known = {"shows": described(case), "signature": signature, "version": stack.version, "case": compact(case)}
    replace_durably(file, (json.dumps(known, indent=1) + "\n").encode())
    return f"kept as {file.name}"
