"""The record of the rows, tests/recorded/stacks.json: the findings, the time and the releases of each row."""

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
    """Replace the findings of an earlier run of a row with the new findings."""
    rows = {**read(), row: {**found, **({"fixes": _grouped(found["fixes"])} if "fixes" in found else {})}}
    text = json.dumps(dict(sorted(rows.items())), indent=1).replace(f"{REPOSITORY}/", "")  # omit local paths
    replace_durably(PATH, f"{text}\n".encode())


def with_fixes(row: str, more: Found) -> Found | None:
    """The record of a row with the results of more fixes; None if there is none of the same releases."""
    found = read().get(row, {})
    if "fixes" not in found or found["on"] != more["on"]:
        return None
    known = {name: word for word, names in found["fixes"].items() for name in names.split()}
    return {**found, "fixes": {**known, **more["fixes"]}}


def _grouped(fixes: dict[str, str]) -> dict[str, str]:
    """The names of the fixes, grouped by result."""
    words: dict[str, list[str]] = {}
    for name, word in fixes.items():
        words.setdefault(word, []).append(name)
    return {word: " ".join(sorted(names)) for word, names in sorted(words.items())}
