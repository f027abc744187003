"""Write docs/reference/symptoms.md: `python tests/symptoms_page.py`. --check: exit with 1 if it is not current."""

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckpt_patches.cli import symptoms
from ckpt_patches.engine.fix import load
from ckpt_patches.engine.format_patch import pages

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "symptoms.md"
HEAD = """# Symptoms

Every error text that a tool or a fix of this package answers, and every visible effect with its fix. `ckpt-patches
explain "ERROR TEXT"` searches them. `…`, numbers and paths differ between runs.
"""


def text() -> str:
    """The error texts that tools answer, those of fixes, then every visible effect, each with its pages."""
    topics = [page for page in symptoms.known() if page.is_topic]
    fixes = [page for page in symptoms.known() if not page.is_topic]
    answers: dict[tuple[str, str], list[str]] = {}
    for page in topics:
        for error, answer in page.errors.items():
            answers.setdefault((answer, page.name), []).append(_code(error))
    by_fixes: dict[str, list[str]] = {}  # error texts with the same answer are one row
    for error in sorted({error for fix in fixes for error in _longest(_of_page(fix))}, key=_letters):
        own = ", ".join(_linked(fix.name) for fix in fixes if error in _longest(_of_page(fix)))
        by_fixes.setdefault(own, []).append(_code(error))
    answered = (("<br>".join(own), answer, _linked(name)) for (answer, name), own in answers.items())
    errors = (("<br>".join(own), links) for links, own in by_fixes.items())
    effects = [load(one.name) for one in fixes if not _of_page(one) or load(one.name).silent]
    rows = (
        (fix.symptom, fix.affected, fix.stacks, _linked(fix.name))
        for fix in sorted(effects, key=lambda f: _letters(f.symptom))
    )
    lines = [
        *(HEAD, "## Error texts that a tool answers", ""),
        *_table(("Error", "What to do", "Page"), answered),
        *("", "## Error texts of fixes", ""),
        *_table(("Error", "Fix"), errors),
        *("", "## Visible effects", ""),
        *_table(("Effect", "Releases", "Stacks", "Fix"), rows),
    ]
    return "\n".join(lines) + "\n"


def _of_page(fix: symptoms.Page) -> tuple[str, ...]:
    """The errors on a fix's page; the messages of its own code name themselves."""
    return tuple(error for error, answer in fix.errors.items() if answer == fix.about)


def _longest(errors: tuple[str, ...]) -> list[str]:
    """The errors, except those that are part of another one."""
    words = {error: symptoms.words(error) for error in errors if len(symptoms.words(error)) > 1}
    parts = {a for a in words for b in words if words[a] != words[b] and symptoms.contains(words[b], words[a])}
    return [error for error in errors if error not in parts]


def _letters(text: str) -> str:
    return re.sub(r"[^\w ]", "", text).strip().casefold()


def _code(error: str) -> str:
    quote = "``" if "`" in error else "`"
    return f"{quote}{error}{quote}".replace("|", "\\|")


def _linked(name: str) -> str:
    folder = pages()[name].parent.name
    return f"[{name}]({name}.md)" if folder == PAGE.parent.name else f"[{name}](../{folder}/{name}.md)"


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for cells in (heads, ("---",) * len(heads), *rows):
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        if PAGE.read_text(encoding="utf-8") == text():
            return 0
        print(f"expected {PAGE} to be current: python tests/symptoms_page.py", file=sys.stderr)
        return 1
    PAGE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
