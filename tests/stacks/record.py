"""The record of the rows, tests/recorded/stacks.json: by row what was found, when, and on which releases."""

import json
from pathlib import Path
from typing import Any

from ckpt_patches.runtime.durable import replace_durably

PATH = Path(__file__).resolve().parents[1] / "recorded" / "stacks.json"
REPOSITORY = PATH.parents[2]
Found = dict[str, Any]


def read() -> dict[str, Found]:
    found: dict[str, Found] = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    return found


def add(row: str, found: Found) -> None:
    """Put what was found in a row in the place of what an earlier run has found."""
    rows = {**read(), row: {**found, **({"fixes": _grouped(found["fixes"])} if "fixes" in found else {})}}
    text = json.dumps(dict(sorted(rows.items())), indent=1).replace(f"{REPOSITORY}/", "")  # no path of this machine
    replace_durably(PATH, f"{text}\n".encode())


def _grouped(fixes: dict[str, str]) -> dict[str, str]:
    """By what became of them, the names of the fixes."""
    words: dict[str, list[str]] = {}
    for name, word in fixes.items():
        words.setdefault(word, []).append(name)
    return {word: " ".join(sorted(names)) for word, names in sorted(words.items())}
