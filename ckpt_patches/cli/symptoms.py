"""Find pages by an error text, an effect, a question, a word or the name of a finding: `ckpt-patches explain TEXT`.

A pasted line matches an error text of a page if it contains most of its words, or is a part of it: for a fix, the
errors in the first section of its page, and the messages of its code; for a topic, such as the audit, the items of its
section "Error texts". If no line matches, the text is compared with each fix's symptom and first section, and with each
topic's page. A word has more weight the fewer pages contain it.
"""

import ast
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import itemgetter
from pathlib import Path

from ckpt_patches.engine.fix import every_fix, load, path_of
from ckpt_patches.engine.format_patch import pages
from ckpt_patches.formats.damages import KINDS
from ckpt_patches.runtime.shown import shortened

CONTAINED = 0.85  # minimum share, by weight, of an error text's words in a pasted line
SHARED = 0.6  # minimum share, by weight, of the words of an effect or a question in a page
IN_TEXT = 0.4  # weight of a word that a topic's page has, and neither its title nor its headings
PART = 0.2  # minimum share of the words of an error text in a pasted line that is a part of it
FEW = 4  # words of an error text; a pasted line must contain a shorter one without gaps
LONGEST = 25  # words of an effect or a question; a longer text is a log, in which only error texts are searched
LONGEST_LINE = 2000  # characters of a line: its begin and its end; patterns take time that grows faster than it
MOST = 5  # answers
NOT_HERE = "not by this package"  # begins the answer to an error text that no fix and no tool is for

# Words that do not describe a symptom.
COMMON = re.compile(
    r"a|about|after|all|also|an|and|any|are|as|at|be|been|but|by|can|cannot|could|did|do|does|for|from|get|gets|got|had|"
    r"has|have|how|i|if|in|into|is|it|its|just|me|my|new|no|not|now|of|on|one|only|or|other|our|out|own|so|some|that|"
    r"the|their|them|then|there|these|they|this|those|to|too|under|up|use|used|using|was|we|were|what|mean|when|where|which|while|who|whose|"
    r"why|will|with|without|would|you|your"
)
# An error, a warning or a log line, as opposed to a name, an option or a call.
ERROR = re.compile(r"\w(?:Error|Exception)\b|^assert |\bfailed\b|^[\w'. ]+(?: [\w'.]+){3}")
NAMED = re.compile(r"\w(?:Error|Exception)\b")
NO_ERROR = re.compile(r"^-|^```|^\w+\(|^File |^(?:if|for|return) |^\w*(?:Error|Exception)$")
COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # of a terminal, in a log
BLOCK = re.compile(r"^```.*\n(?:(?!```).*\n)*```$|^ {4}.*(?:\n {4}.*)*", re.MULTILINE)

# Words of users, and what the pages call them.
SYNONYMS = {
    "jump": "spike diverge explode went rise rose increase",
    "hang": "stuck deadlock freeze",
    "memory": "oom",
    "container": "docker dockerfile",
    "overhead": "cost slow",
    "untrusted": "security malicious",
    "switch": "disable turn",
    "patch": "send submit contribute",
    "rank": "gpu",
    "gradient": "grad",
    "damage": "corrupt broken truncated",
    "verify": "prove validate",
    "compatibility": "compatible covered supported",
}


@dataclass(frozen=True)
class Page:
    """What is searched of a page."""

    name: str
    about: str  # a fix: its symptom; a topic: its title
    heads: str  # a fix: its symptom and first section; a topic: title, headings, first paragraph, texts it answers
    text: str = ""  # a topic's page
    errors: dict[str, str] = field(default_factory=dict)  # without backquotes, `…` for what differs; with the answer

    @property
    def is_topic(self) -> bool:
        return bool(self.text)

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(words(f"{self.name.replace('_', ' ')} {self.heads}"))

    @cached_property
    def others(self) -> frozenset[str]:
        """The words of the text that are not in the heads."""
        return frozenset(words(self.text)) - self.words


@dataclass(frozen=True)
class Answer:
    """A page, or a finding of the audit, that a text matches."""

    name: str
    why: str  # one line: what to do, a symptom or a title
    page: str  # to read on
    matched: str = ""  # the error text that matches


@cache
def known() -> tuple[Page, ...]:
    """The pages of all fixes and topics."""
    fixes = every_fix()
    return tuple(_of_fix(path) if name in fixes else _of_topic(path) for name, path in sorted(pages().items()))


def _of_fix(path: Path) -> Page:
    _, section, *_ = [*path.read_text(encoding="utf-8").split("\n## ", 2), ""]
    symptom = load(path.stem).symptom
    text = f"{symptom}\n\n{section.partition(chr(10))[2]}"
    own = f"a message of this fix, which its page explains; CKPT_PATCHES_SKIP={path.stem} turns it off"
    said = messages(Path(path_of(path.stem)).read_text(encoding="utf-8"))
    return Page(path.stem, symptom, text, errors=dict.fromkeys(said, own) | dict.fromkeys(errors(text), symptom))


def messages(code: str) -> Iterator[str]:
    """The messages in a fix's code, also in code that it has as text; `…` for what differs. Prose is no Python."""
    text = re.sub(r"\{\w*\}", "…", textwrap.dedent(code))
    try:
        parsed = ast.parse(text.replace("…", "Ellipsis"))
    except SyntaxError:
        prose = text.replace("Ellipsis", "…")
        if len(words(prose)) >= FEW:
            yield " ".join(prose.split())
    else:
        for inner in _strings(parsed):
            yield from messages(inner)


def _strings(node: ast.AST) -> Iterator[str]:
    """The strings below a node, without docstrings, what describes the fix, and what it looks for in upstream."""
    called = node.func if isinstance(node, ast.Call) else None
    looks = getattr(getattr(called, "value", None), "id", "") == "source"
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if looks or is_docstring or getattr(called, "id", "") in ("Fix", "NoMatch"):
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    else:
        for inner in ast.iter_child_nodes(node):
            yield from _strings(inner)


def _of_topic(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    title, _, rest = text.partition("\n")
    prose = [part for part in BLOCK.sub("", rest).split("\n\n") if part.strip() and part.strip()[0] not in "|<#"]
    _, _, section = rest.partition("\n## Error texts\n")
    answers = _answers(section.partition("\n## ")[0])
    answered = [error for error, answer in answers.items() if not answer.startswith(NOT_HERE)]
    heads = "\n".join([title, *re.findall(r"^#+ (.*)", rest, re.MULTILINE), *prose[:1], *answered])
    return Page(path.stem, title.removeprefix("# "), heads, text, answers)


def _answers(section: str) -> dict[str, str]:
    """The error texts of a section's items, such as "- `TEXT`, `TEXT`: what to do.", each with what to do."""
    found = {}
    for item in re.split(r"^- ", section, flags=re.MULTILINE)[1:]:
        texts, _, answer = " ".join(item.split()).partition("`: ")
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", f"{texts}`"), answer)
    return found


def errors(markdown: str) -> Iterable[str]:
    """The error texts and log lines in code blocks and inline code, each on one line.

    Of a block all lines but a traceback's file names and its source lines, which are indented.
    """
    for block in BLOCK.findall(markdown):
        lines = textwrap.dedent(block).splitlines()
        texts = (re.split(r" {2,}", line)[0] for line in lines)  # a remark may follow
        yield from (text for text in texts if text and not NO_ERROR.search(text))
    codes = (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", BLOCK.sub("\n\n", markdown)))
    yield from (code for code in codes if ERROR.search(code) and not NO_ERROR.search(code))


def words(text: str) -> list[str]:
    """The words to compare, without endings, numbers, folders and common words."""
    text = re.sub(r"(?<![~\w.-])(?:[~\w.-]*/)+", " ", text)
    text = re.sub(r"\b\d[\d.]*(?:e[+-]?\d+)?\b", " ", text)
    text = re.sub(r"_\d+", "_0", text)
    found = re.findall(r"[^\W\d_][\w-]+|(?<!_)_+[^\W_]\w*", text.lower())
    return [_stem(word.strip("-")) for word in found if not COMMON.fullmatch(word)]


def _stem(word: str) -> str:
    """Remove the ending of a plural or a verb; keep names that contain `_`, `-` or digits."""
    if not word.isalpha():
        return word
    stem = re.sub(r"(?<=...)(?:ing|ed|es|s|e)$", "", word)
    return re.sub(r"([b-df-hj-np-tv-z])\1$", r"\1", stem) if word.endswith(("ing", "ed")) else stem


def search(text: str) -> list[Answer]:
    """At most MOST answers, the best first: a finding by its name, or pages with an error text in `text`.

    Without those, the pages with most of the words of `text`, first topics that have all of them in their heads.
    """
    if kind := KINDS.get(text.strip()):
        return [Answer(kind.name, f"{kind.severity}: {kind.meaning}; {kind.remedy}", "findings")]
    raw = [*dict.fromkeys(shortened(line, LONGEST_LINE) for line in COLOR.sub("", text).splitlines())]
    return _by_error(raw) or _by_words(" ".join(raw))


def _by_error(raw: Sequence[str]) -> list[Answer]:
    """Pages with an error text that the lines contain, and the heaviest of their texts."""
    lines = [*dict.fromkeys(tuple(found) for line in raw if (found := words(line)))]
    pasted = {word for line in lines for word in line}
    ranked = []
    for each in known():
        matching = {error: weight for error in each.errors if (weight := _found(error, lines, raw))}
        if not matching:
            continue
        total = _sum({word for error in matching for word in words(error)} & pasted)
        heaviest = max(matching, key=lambda error: (matching[error], error))
        why = each.errors[heaviest]
        # Among equals what a tool answers, being more general, then fixes, then what nothing here answers.
        rank = -round(total, 6), why.startswith(NOT_HERE), not each.is_topic, each.name
        ranked.append((rank, Answer(each.name, why, each.name, f"error text: {heaviest}")))
    return [answer for _, answer in sorted(ranked, key=itemgetter(0))][:MOST]


def _found(error: str, lines: Sequence[Sequence[str]], raw: Sequence[str]) -> float:
    """The weight of the words of an error text that the lines contain; 0 if too few."""
    every = words(error)
    if len(every) < 2:
        verbatim = re.compile(rf"(?<!\w){re.escape(error)}(?!\w)")
        return _sum(every) if any(map(verbatim.search, raw)) else 0.0
    if any(contains(line, every) for line in lines):
        return _sum({*every})
    least = max(2, PART * len(every))
    if part := max((_sum({*line}) for line in lines if len(line) >= least and contains(every, line)), default=0.0):
        return part
    best = max((_sum({*every}.intersection(line)) for line in lines), default=0.0)
    return best if len(every) >= FEW and best >= CONTAINED * _sum({*every}) else 0.0


def contains(line: Sequence[str], part: Sequence[str]) -> bool:
    """Whether a line contains the words of a part, in order and without gaps."""
    return f" {' '.join(part)} " in f" {' '.join(line)} "


def _by_words(text: str) -> list[Answer]:
    """Pages with most of the words of an effect or a question."""
    ours = {_stem(theirs): _stem(word) for word, others in SYNONYMS.items() for theirs in others.split()}
    asked = frozenset(ours.get(word, word) for word in words(text))
    scores = [(score, each) for each in known() if (score := _score(each, asked, text))]
    scores.sort(key=lambda found: (not (found[1].is_topic and asked <= found[1].words), -found[0]))
    return [Answer(each.name, each.about, each.name) for _, each in scores[:MOST]]


def _score(each: Page, asked: frozenset[str], text: str) -> float:
    """The weight of the words of an effect or a question that a page has; 0 if it has too few."""
    is_error = bool(NAMED.search(text))
    if is_error and each.is_topic:  # its error texts are compared as a whole
        return 0.0
    in_heads, in_text = asked & each.words, asked & each.others
    fewest = min(2, len(text.split() if is_error else asked))
    needed = (CONTAINED if is_error else SHARED) * _sum(asked)
    both = in_heads | in_text
    if not asked or len(asked) > LONGEST or len(both) < fewest or _sum(both) < needed:
        return 0.0
    in_title = asked.intersection(words(f"{each.name.replace('_', ' ')} {each.about}"))
    return _sum(in_heads) + _sum(in_title) + IN_TEXT * _sum(in_text)


@cache
def weights() -> dict[str, float]:
    """The weight of each word: the logarithm of (pages + 1) / (pages that contain the word)."""
    count = Counter(word for each in known() for word in each.words | each.others)
    return {word: math.log((len(known()) + 1) / number) for word, number in count.items()}


def _sum(some: Iterable[str]) -> float:
    weight = weights()
    unknown = math.log(len(known()) + 1)
    return sum(weight.get(word, unknown) for word in sorted(some))
