"""Find phrases that are not plain English, in pages and in programs: `python tests/wording.py`, in `make lint`.

In a program these are its texts, docstrings and comments.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PROGRAMS = ("ckpt_patches", "deepspeed_patches", "megatron/patches", "nvrx_patches", "apex_patches", "torch_patches")

# What is banned, and what to write.
BANNED = {
    r"\b(?:dies|died|die) (?:of|on|with)\b": "fails with, raises",
    r"\b(?:is|are|was|were) told\b": "reports, logs, detects",
    r"\b(?:is|are) said\b": "reports, logs, prints",
    r"\bgives? no word\b": "reports nothing",
    r"\bheld against\b": "is compared with",
    r"\blays? (?:the |all )?(?:fixes|patches) over\b|\b(?:are|is) laid over\b": "patches",
    r"\bsigns? of life\b": "heartbeat",
    r"\bkept plans?\b": "cached plan",
    r"\b(?:are|is|not) whole\b|\bwhole (?:run|checkpoint|folder)s?\b": "complete",
    r"\bWho (?:trains|saves|loads)\.": "a noun phrase",
    r"\bis no fix\b|\bthere is none\b|\bthere are none\b|\bis none\b": "not a fix, no … exists",
    r"\btwice is as good as once\b": "idempotent",
    r"\bmends?\b|\bmended\b": "fixes, fixed",
    r"\bstand-ins?\b": "stub",
    r"\b(?:checkpoint|file|header|index|pickle|record|release)s? (?:say|does not say|do not say)s?\b": "states",
    r"\bat hand\b": "available",
    r"\bturned bits?\b": "flipped bit",
    r"\bin the same words\b": "shared",
}


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """The line of each banned phrase, the phrase, and what to write in its place; code in fences is left out."""
    hidden = re.sub(r"(?ms)^```.*?^```$", lambda fence: "\n" * fence[0].count("\n"), text)
    for pattern, better in BANNED.items():
        for found in re.finditer(pattern.replace(" ", r"\s+"), hidden):
            yield hidden.count("\n", 0, found.start()) + 1, " ".join(found[0].split()), better


def pages() -> list[Path]:
    return [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").glob("*.md"))]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the text of each string and each comment of a program; a comment continues on the next line."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    comments = [
        (token.start[0], token.string.lstrip("# "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    for position, (line, text) in enumerate(comments):
        following = comments[position + 1 : position + 2]
        yield line, "\n".join([text, *(more for at, more in following if at == line + 1)])


def complaints() -> list[str]:
    """A line for each banned phrase in a page or in a text of a program."""
    found = []
    for page in pages():
        for line, phrase, better in findings(page.read_text(encoding="utf-8")):
            found.append(f"{page.relative_to(REPOSITORY)}:{line}: {phrase!r}; write: {better}")
    for path in sorted(path for folder in PROGRAMS for path in (REPOSITORY / folder).rglob("*.py")):
        if "upstream_tests" in path.parts:
            continue
        for line, text in texts(path):
            for _, phrase, better in findings(text):
                found.append(f"{path.relative_to(REPOSITORY)}:{line}: {phrase!r}; write: {better}")
    return found


def main() -> int:
    found = complaints()
    print("\n".join(found) or "no banned phrases")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
