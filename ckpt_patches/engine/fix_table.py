"""The table of bugs: symptom, affected releases and stacks, and the fix. Silent bugs come first."""

from collections.abc import Iterable

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.installed import DISTRIBUTIONS
from ckpt_patches.engine.registry import DEEPSPEED

SILENT = "Silent: wrong state without an error"
VISIBLE = "Visible: an error, a hang or high memory use"

Row = tuple[str, str, str, str]


def groups(fixes: Iterable[Fix]) -> list[tuple[str, list[Row]]]:
    """The heading and the rows of each non-empty group."""
    every = list(fixes)
    found = [
        (title, [row(f) for f in every if f.silent is silent]) for title, silent in ((SILENT, True), (VISIBLE, False))
    ]
    return [(title, rows) for title, rows in found if rows]


def row(fix: Fix) -> Row:
    title = "DeepSpeed" if fix.package == DEEPSPEED else DISTRIBUTIONS[fix.package]
    ranges = ", ".join(first if first == last else f"{first} \N{EN DASH} {last}" for first, last in fix.releases)
    return fix.symptom, f"{title} {ranges}".strip(), fix.stacks, fix.name
