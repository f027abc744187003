"""The record of the writers, tests/recorded/writers.json: versions, date and results by writer."""

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
    """Replace a writer's results of an earlier run."""
    text = json.dumps(dict(sorted({**read(), writer: found}.items())), indent=1)
    replace_durably(PATH, f"{text}\n".encode())
