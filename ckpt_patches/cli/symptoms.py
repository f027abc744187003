"""Find a fix by an error text or a visible effect: `ckpt-patches explain "KeyError: 'step'"`.

What is known of each fix is its `symptom` and the first section of its page. A pasted line matches an error text of
a page if it has most of its words, or is a part of it. Where none does, text matches a fix if most of its own words are
in what is known of the fix. A word counts the more the fewer fixes have it.
"""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property

from ckpt_patches.engine.fix import load
from ckpt_patches.engine.registry import FIXES

CONTAINED = 0.8  # of an error text, by weight: the share that a pasted line has to contain
SHARED = 0.6  # of a description of an effect, by weight: the share that a fix's symptom has to contain
FEW = 4  # words of an error text; with fewer, a pasted line has to contain them side by side
LONGEST = 25  # words of a description of an effect; a longer text is a log, in which only error texts are looked for
MOST = 8  # candidates

# Words that say nothing of a symptom.
COMMON = re.compile(
    r"a|about|after|all|also|an|and|any|are|as|at|be|been|but|by|can|cannot|could|did|do|does|for|from|get|gets|got|had|"
    r"has|have|how|i|if|in|into|is|it|its|just|me|my|new|no|not|now|of|on|one|only|or|other|our|out|own|so|some|that|"
    r"the|their|them|then|there|these|they|this|those|to|too|under|up|was|we|were|what|when|where|which|while|who|whose|"
    r"why|will|with|without|would|you|your"
)
# An error, a warning or a line of a log, in contrast to a name, an option or a call.
ERROR = re.compile(r"\w(?:Error|Exception)\b|^assert |\bfailed\b|^[\w'. ]+(?: [\w'.]+){3}")
NAMED = re.compile(r"\w(?:Error|Exception)\b")
NO_ERROR = re.compile(r"^-|^\w+\(|^File |^(?:if|for|return) |^\w*(?:Error|Exception)$")
BLOCK = re.compile(r"^```.*\n(?:(?!```).*\n)*```$|^ {4}.*(?:\n {4}.*)*", re.MULTILINE)


@dataclass(frozen=True)
class Symptom:
    """What is known of a fix's symptom."""

    fix: str
    text: str
    errors: tuple[str, ...]  # without quotes of code; `…` for what differs between runs

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(words(f"{self.fix.replace('_', ' ')} {self.text}"))


@dataclass(frozen=True)
class Match:
    """A fix that a text matches."""

    fix: str
    is_error: bool  # an error text of the fix is in it
    weight: float  # of the words that both have


@cache
def known() -> tuple[Symptom, ...]:
    """The symptoms of all fixes."""
    from ckpt_patches.cli import explain

    found = []
    for name in FIXES:
        _, section, *_ = [*explain.page_text(name).split("\n## ", 2), ""]
        text = f"{load(name).symptom}\n\n{section.partition(chr(10))[2]}"
        found.append(Symptom(name, text, tuple(dict.fromkeys(errors(text)))))
    return tuple(found)


def errors(markdown: str) -> Iterable[str]:
    """The error texts and lines of logs in code, each on one line."""
    for block in BLOCK.findall(markdown):
        yield from _of_block(block)
    for code in re.findall(r"`([^`]+)`", BLOCK.sub("\n\n", markdown)):
        text = " ".join(code.split())
        if ERROR.search(text) and not NO_ERROR.search(text):
            yield text


def _of_block(block: str) -> Iterable[str]:
    """The lines of a block without a traceback's: places in files, and the code of them, which is indented."""
    for line in textwrap.dedent(re.sub(r"^```.*\n?", "", block, flags=re.MULTILINE)).splitlines():
        text = re.split(r" {2,}", line)[0]  # a remark may follow
        if text and not NO_ERROR.search(text):
            yield text


def words(text: str) -> list[str]:
    """The words that do not differ between runs, in the form in which they are compared: no numbers and no folders."""
    text = re.sub(r"(?:[~\w.-]*/)+", " ", text)
    text = re.sub(r"\b\d[\d.]*(?:e[+-]?\d+)?\b", " ", text)
    text = re.sub(r"_\d+", "_0", text)
    found = re.findall(r"[^\W\d_][\w-]*|_\w*[^\W_]\w*", text.lower())
    return [_stem(word.strip("-")) for word in found if not COMMON.fullmatch(word)]


def _stem(word: str) -> str:
    """Without the ending of a plural or a verb; names of variables and classes as they are."""
    return re.sub(r"(?<=...)(?:ing|ed|es|s|e)$", "", word) if word.isalpha() else word


def search(text: str) -> list[Match]:
    """The fixes whose error text a text has, best first; where there are none, those with most of its words."""
    weight = weights()
    matches = [match for symptom in known() if (match := _match(symptom, text, weight))]
    only_errors = any(match.is_error for match in matches)
    return sorted([m for m in matches if m.is_error is only_errors], key=lambda match: -match.weight)[:MOST]


@cache
def weights() -> dict[str, float]:
    """By word: how telling it is. The logarithm of the number of fixes per fix whose symptom has it."""
    count = Counter(word for symptom in known() for word in symptom.words)
    return {word: math.log((len(known()) + 1) / number) for word, number in count.items()}


def _match(symptom: Symptom, text: str, weight: dict[str, float]) -> Match | None:
    lines = [line for line in dict.fromkeys(text.splitlines()) if words(line)]
    of_text = frozenset(words(text))
    both = of_text & symptom.words
    shared = _sum(both, weight)
    if found := max((_found(error, lines, weight) for error in symptom.errors), default=0.0):
        return Match(symptom.fix, True, found + shared / 1000)  # alike in the error, they differ in the other lines
    needed = (CONTAINED if NAMED.search(text) else SHARED) * _sum(of_text, weight)
    if len(both) >= 2 and len(of_text) <= LONGEST and shared >= needed:
        return Match(symptom.fix, False, shared)
    return None


def _found(error: str, lines: list[str], weight: dict[str, float]) -> float:
    """The weight of the words of an error text that lines have; 0 if these are too few of them."""
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
    """Whether the words of a line have those of a part, side by side."""
    return f" {' '.join(part)} " in f" {' '.join(line)} "


def _sum(some: Iterable[str], weight: dict[str, float]) -> float:
    unknown = max(weight.values())
    return sum(weight.get(word, unknown) for word in sorted(some))
