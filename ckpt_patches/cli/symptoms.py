"""Find a fix by an error text or a visible effect: `ckpt-patches explain "KeyError: 'step'"`.

The search covers each fix's `symptom` and the first section of its page. A pasted line matches an error text of a page
if it contains most of its words, or is a part of it. If no line matches, the text matches a fix if the fix's symptom
or section contains most words of the text. A word has more weight the fewer fixes contain it.
"""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property

from ckpt_patches.engine.fix import every_fix, load

CONTAINED = 0.8  # minimum share, by weight, of an error text's words in a pasted line
SHARED = 0.6  # minimum share, by weight, of the words of an effect's description in a fix's symptom
FEW = 4  # words of an error text; a pasted line must contain a shorter one without gaps
LONGEST = 25  # words of an effect's description; a longer text is a log, in which only error texts are searched
MOST = 8  # results

# Words that do not describe a symptom.
COMMON = re.compile(
    r"a|about|after|all|also|an|and|any|are|as|at|be|been|but|by|can|cannot|could|did|do|does|for|from|get|gets|got|had|"
    r"has|have|how|i|if|in|into|is|it|its|just|me|my|new|no|not|now|of|on|one|only|or|other|our|out|own|so|some|that|"
    r"the|their|them|then|there|these|they|this|those|to|too|under|up|was|we|were|what|when|where|which|while|who|whose|"
    r"why|will|with|without|would|you|your"
)
# An error, a warning or a log line, as opposed to a name, an option or a call.
ERROR = re.compile(r"\w(?:Error|Exception)\b|^assert |\bfailed\b|^[\w'. ]+(?: [\w'.]+){3}")
NAMED = re.compile(r"\w(?:Error|Exception)\b")
NO_ERROR = re.compile(r"^-|^\w+\(|^File |^(?:if|for|return) |^\w*(?:Error|Exception)$")
BLOCK = re.compile(r"^```.*\n(?:(?!```).*\n)*```$|^ {4}.*(?:\n {4}.*)*", re.MULTILINE)


@dataclass(frozen=True)
class Symptom:
    """The searched text of a fix."""

    fix: str
    text: str
    errors: tuple[str, ...]  # without backquotes; `…` stands for a part that differs between runs

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(words(f"{self.fix.replace('_', ' ')} {self.text}"))


@dataclass(frozen=True)
class Match:
    """A fix that a text matches."""

    fix: str
    is_error: bool  # the text contains an error text of the fix
    weight: float  # of the words that text and fix share


@cache
def known() -> tuple[Symptom, ...]:
    """The symptoms of all fixes."""
    from ckpt_patches.engine.format_patch import page

    found = []
    for name in every_fix():
        _, section, *_ = [*page(name).read_text(encoding="utf-8").split("\n## ", 2), ""]
        text = f"{load(name).symptom}\n\n{section.partition(chr(10))[2]}"
        found.append(Symptom(name, text, tuple(dict.fromkeys(errors(text)))))
    return tuple(found)


def errors(markdown: str) -> Iterable[str]:
    """The error texts and log lines in code blocks and inline code, each on one line."""
    for block in BLOCK.findall(markdown):
        yield from _of_block(block)
    for code in re.findall(r"`([^`]+)`", BLOCK.sub("\n\n", markdown)):
        text = " ".join(code.split())
        if ERROR.search(text) and not NO_ERROR.search(text):
            yield text


def _of_block(block: str) -> Iterable[str]:
    """The lines of a code block, without a traceback's file names and its source lines, which are indented."""
    for line in textwrap.dedent(re.sub(r"^```.*\n?", "", block, flags=re.MULTILINE)).splitlines():
        text = re.split(r" {2,}", line)[0]  # a remark may follow
        if text and not NO_ERROR.search(text):
            yield text


def words(text: str) -> list[str]:
    """The words to compare, without endings, numbers, folders and common words."""
    text = re.sub(r"(?:[~\w.-]*/)+", " ", text)
    text = re.sub(r"\b\d[\d.]*(?:e[+-]?\d+)?\b", " ", text)
    text = re.sub(r"_\d+", "_0", text)
    found = re.findall(r"[^\W\d_][\w-]*|_\w*[^\W_]\w*", text.lower())
    return [_stem(word.strip("-")) for word in found if not COMMON.fullmatch(word)]


def _stem(word: str) -> str:
    """Remove the ending of a plural or a verb; keep names that contain `_`, `-` or digits."""
    return re.sub(r"(?<=...)(?:ing|ed|es|s|e)$", "", word) if word.isalpha() else word


def search(text: str) -> list[Match]:
    """The fixes with an error text in `text`, best first. Without one, those that contain most of its words."""
    weight = weights()
    matches = [match for symptom in known() if (match := _match(symptom, text, weight))]
    only_errors = any(match.is_error for match in matches)
    return sorted([m for m in matches if m.is_error is only_errors], key=lambda match: -match.weight)[:MOST]


@cache
def weights() -> dict[str, float]:
    """The weight of each word: the logarithm of (fixes + 1) / (fixes that contain the word)."""
    count = Counter(word for symptom in known() for word in symptom.words)
    return {word: math.log((len(known()) + 1) / number) for word, number in count.items()}


def _match(symptom: Symptom, text: str, weight: dict[str, float]) -> Match | None:
    lines = [line for line in dict.fromkeys(text.splitlines()) if words(line)]
    of_text = frozenset(words(text))
    both = of_text & symptom.words
    shared = _sum(both, weight)
    if found := max((_found(error, lines, weight) for error in symptom.errors), default=0.0):
        return Match(symptom.fix, True, found + shared / 1000)  # the other words decide between equal errors
    needed = (CONTAINED if NAMED.search(text) else SHARED) * _sum(of_text, weight)
    if len(both) >= 2 and len(of_text) <= LONGEST and shared >= needed:
        return Match(symptom.fix, False, shared)
    return None


def _found(error: str, lines: list[str], weight: dict[str, float]) -> float:
    """The weight of the words of an error text that the lines contain; 0 if too few."""
    every = words(error)
    if len(every) < 2:
        verbatim = re.compile(rf"(?<!\w){re.escape(error)}(?!\w)")
        return _sum(every, weight) if any(map(verbatim.search, lines)) else 0.0
    pasted = [words(line) for line in lines]
    if any(contains(line, every) for line in pasted):
        return _sum({*every}, weight)
    if part := max((_sum({*line}, weight) for line in pasted if len(line) > 1 and contains(every, line)), default=0.0):
        return part
    parts = [{*words(part)} for part in re.split(r"…|\.\.\.", error)]
    best = [max(_sum(part.intersection(line), weight) for line in pasted) for part in parts] if pasted else []
    enough = len(every) >= FEW and sum(best) >= CONTAINED * sum(_sum(part, weight) for part in parts)
    return sum(best) if enough else 0.0


def contains(line: list[str], part: list[str]) -> bool:
    """Whether a line contains the words of a part, in order and without gaps."""
    return f" {' '.join(part)} " in f" {' '.join(line)} "


def _sum(some: Iterable[str], weight: dict[str, float]) -> float:
    unknown = max(weight.values())
    return sum(weight.get(word, unknown) for word in sorted(some))
