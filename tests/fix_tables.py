"""Write the tables of fixes in docs/symptoms.md: `python tests/fix_tables.py`."""

import re
from collections.abc import Callable
from pathlib import Path

import generated
from ckpt_patches.cli import symptoms
from ckpt_patches.engine.fix import load
from ckpt_patches.engine.fix_table import row
from upstream import REPOSITORY

BLOCK = "fixes"


def by_symptom() -> str:
    """Every error text, then every visible effect, each with its fixes."""
    by_error: dict[str, list[str]] = {}
    for symptom in symptoms.known():
        for error in _longest(symptom.errors):
            by_error.setdefault(error, []).append(symptom.fix)
    errors = [(_code(error), ", ".join(map(_linked, by_error[error]))) for error in sorted(by_error, key=_letters)]
    effects = [load(one.fix) for one in symptoms.known() if not one.errors or load(one.fix).silent]
    rows = [(*row(fix)[:3], _linked(fix.name)) for fix in sorted(effects, key=lambda f: _letters(f.symptom))]
    return (
        f"## Error texts\n\n{generated.table(('Error', 'Fix'), errors)}\n\n"
        f"## Visible effects\n\n{generated.table(('Effect', 'Releases', 'Stacks', 'Fix'), rows)}"
    )


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
    return f"[{name}]({name}.md)"


PAGES: dict[Path, Callable[[], str]] = {
    REPOSITORY / "docs" / "symptoms.md": by_symptom,
}


def main() -> None:
    for path, text in PAGES.items():
        generated.write(path, {BLOCK: text()})


if __name__ == "__main__":
    main()
