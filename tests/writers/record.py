"""The record of the writers, tests/recorded/writers.json: by writer what was installed, when, and what was found."""

import json
from pathlib import Path
from typing import Any

from ckpt_patches.runtime.durable import replace_durably

PATH = Path(__file__).resolve().parents[1] / "recorded" / "writers.json"
CHANGES = ("a NaN", "without a file")
Case = dict[str, Any]
Found = dict[str, Any]


def read() -> dict[str, Found]:
    found: dict[str, Found] = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    return found


def add(writer: str, found: Found) -> None:
    """Put what was found of a writer in the place of what an earlier run has found."""
    text = json.dumps(dict(sorted({**read(), writer: found}.items())), indent=1)
    replace_durably(PATH, f"{text}\n".encode())
