"""Report the result of a repair as text or JSON."""

from pathlib import Path
from typing import Any

from ckpt_patches.audit.audit import REPAIRED
from ckpt_patches.audit.repair.repair import Result
from ckpt_patches.audit.repair_list import NAME

SCHEMA = 3  # of the JSON; raised when a key is renamed, removed or changes its meaning


def as_text(output: Path, result: Result) -> str:
    now = result.now
    lines = [f"{' '.join(key)}: {now.elements(key)} elements: {now.sources[key]}" for key in now.ranges]
    changed = f"{sum(map(now.elements, now.ranges))} elements repaired, no other changed"
    lines.append(f"{output} is {REPAIRED}: {changed}; they are listed in it ({NAME})")
    return "\n".join([*lines, "to resume from it, give it the name and place of the damaged one"])


def as_json(output: Path, result: Result) -> dict[str, Any]:
    now, older = result.now, result.older
    return {
        "schema": SCHEMA,
        "output": str(output),
        "source": {"path": str(older.path), "step": older.step} if older else None,
        "repaired": [
            {"array": key[0], "shard": key[1], "source": now.sources[key], "elements": now.elements(key)}
            for key in now.ranges
        ],
        "verdict": REPAIRED,
    }
