"""Keep what an exploration without fixes has found: `python -m explore.corpus .explore/deepspeed-0.19.8-off-1.json`.

A case that is SILENT without one fix, and not with all of them, is kept as `corpus/FIX.json`, unless there is one.
"""

import json
import sys
from pathlib import Path
from typing import Any

from ckpt_patches.engine.fix import load, package_of
from ckpt_patches.engine.registry import DEEPSPEED, FIXES
from ckpt_patches.runtime.durable import replace_durably
from explore.deepspeed_space import complete, described
from explore.judged import SILENT, Stack, outcome
from upstream import newest

CORPUS = Path(__file__).parent / "corpus"


def kept() -> dict[str, dict[str, Any]]:
    """What is kept, by the name of its file: a fix, and of several cases of one what is particular to it.

    A "version" is that of an older release than the newest one with the bug, where that one is not silent.
    """
    files = {path.stem: json.loads(path.read_text()) for path in sorted(CORPUS.glob("*.json"))}
    return {name: {**known, "case": complete(known["case"])} for name, known in files.items()}


def silent_fixes(version: str) -> list[str]:
    """Those of silent bugs that a release has."""
    mine = [load(name) for name in FIXES if package_of(name) == DEEPSPEED]
    return [fix.name for fix in mine if fix.silent and fix.affects(version)]


def keep(case: dict[str, Any], version: str) -> str:
    """The file that a case was kept in; or why it was not."""
    with_all = outcome(case, Stack(version))
    if with_all.kind == SILENT:
        return f"SILENT with all fixes: {with_all.signature}"
    for name in silent_fixes(version):
        file = CORPUS / f"{name}.json"
        without = outcome(case, Stack(version, without=name))
        if without.kind == SILENT and not file.exists():
            known = {"shows": described(case), "signature": without.signature, "case": case}
            replace_durably(file, (json.dumps(known, indent=1) + "\n").encode())
            return str(file)
        if without.kind == SILENT:
            return f"there is {file} already"
    return "SILENT without any of several fixes"


def main(state: str) -> None:
    version = newest("deepspeed")
    CORPUS.mkdir(exist_ok=True)
    for one in json.loads(Path(state).read_text())["silent"]:
        if one.get("shrunk"):
            print(f"{described(one['case'])}: {keep(one['case'], version)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
