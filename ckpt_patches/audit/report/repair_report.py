"""Report the result of a repair as text or JSON."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ckpt_patches.audit.repair.repair import Result
from ckpt_patches.audit.repair_list import NAME

SCHEMA = 1  # of the JSON; raised when a key is renamed, removed or changes its meaning


def as_text(output: Path, result: Result) -> str:
    lines = [f"{one.array} {one.shard}: {one.elements} elements: {one.source}" for one in result.done]
    for own in result.copies:
        doubt = f", with what can differ between ranks: {own.differs}" if own.differs else ""
        lines.append(f"{own.name}: copied for {len(own.missing)} ranks{doubt}")
    elements = sum(one.elements for one in result.done)
    moved = f", {result.moved} of masters, and of their moments, moved to their places" if result.moved else ""
    changed = f"{elements} elements repaired{moved}, no other changed"
    lines.append(f"{output} is {result.verdict}: {changed}; they are listed in it ({NAME})")
    if result.left:
        lines[-1] += f"; {len(result.left)} findings could not be repaired:"
    lines += [f"  {found.kind.name} {found.array} {found.shard}: {reason}" for found, reason in result.left]
    return "\n".join(lines)


def as_json(output: Path, result: Result) -> dict[str, Any]:
    source = None if result.source is None else dict(zip(("path", "step"), result.source, strict=True))
    return {
        "schema": SCHEMA,
        "output": str(output),
        "source": source,
        "repaired": [asdict(one) for one in result.done],
        "copied": [{"from": own.name, "to": list(own.missing)} for own in result.copies],
        "moved": result.moved,
        "verdict": result.verdict,
        "left": [
            {"kind": found.kind.name, "array": found.array, "shard": found.shard, "reason": reason}
            for found, reason in result.left
        ],
    }
