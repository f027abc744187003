"""Report the result of a repair as text or JSON."""

from pathlib import Path
from typing import Any

from ckpt_patches.audit.repair.repair import Result
from ckpt_patches.audit.repair_list import NAME

SCHEMA = 2  # of the JSON; raised when a key is renamed, removed or changes its meaning


def as_text(output: Path, result: Result) -> str:
    now = result.now
    lines = [f"{' '.join(key)}: {now.elements(key)} elements: {now.sources[key]}" for key in now.ranges]
    for own in result.made.copies:
        doubt = f", with what can differ between ranks: {own.differs}" if own.differs else ""
        lines.append(f"{own.name}: copied for {len(own.missing)} ranks{doubt}")
    changed = f"{sum(map(now.elements, now.ranges))} elements repaired, no other changed"
    lines.append(f"{output} is {result.verdict}: {changed}; they are listed in it ({NAME})")
    if result.left:
        lines[-1] += f"; {len(result.left)} findings are left:"
    lines += [f"  {found.kind.name} {found.array} {found.shard}: {reason}" for found, reason in result.left]
    if not result.left:
        lines.append("to resume from it, give it the name and place of the damaged one: it is loaded as that is")
    return "\n".join(lines)


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
        "copied": [{"from": own.name, "to": list(own.missing)} for own in result.made.copies],
        "verdict": result.verdict,
        "left": [
            {"kind": found.kind.name, "array": found.array, "shard": found.shard, "reason": reason}
            for found, reason in result.left
        ],
    }
