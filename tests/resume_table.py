"""Write the results in docs/resume.md from the recorded runs of resumes: `python tests/resume_table.py`."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import generated
from generated import KNOWN
from recorded_results import ranges, read
from upstream import REPOSITORY, numbers

RECORDED = REPOSITORY / "tests" / "recorded"
RECORD = RECORDED / "resume.json"
ACROSS = RECORDED / "resume_across.json"
ZERO = RECORDED / "resume_zero.json"
PAGE = REPOSITORY / "docs" / "resume.md"

Row = Mapping[str, Any]
Record = Mapping[str, Iterable[Row]]  # by test
# In the order of their columns.
FORMATS = (
    "torch",
    "dp_zero_gather_scatter",
    "fully_sharded_bucket_space",
    "fully_sharded_model_space",
    "dp_reshardable",
    "fully_reshardable",
)
# Two optimizers that round differently share the parameters, and which has which depends on the data-parallel size.
SPLIT_DIFFERS = ("fused", "hybrid-0.5", 4)
ROUNDING = 1e-6

KINDS = {
    "stage0": "bf16 without ZeRO",
    "stage0_fp16": "fp16 without ZeRO",
    "stage1": "bf16 stage 1",
    "bf16_optimizer": "BF16_Optimizer",
    "stage1_fp16": "fp16 stage 1",
    "stage2": "bf16 stage 2",
    "stage2_fp16": "fp16 stage 2",
    "stage3": "bf16 stage 3",
    "stage3_fp16": "fp16 stage 3",
}
# How upstream refuses an ordinary checkpoint of another number of ranks, at stages 1 to 3.
OTHER_RANKS = "ZeRORuntimeException: The checkpoint being loaded used a DP world size of"


@dataclass(frozen=True)
class Result:
    """What one run gave, and where it belongs in a table."""

    name: str  # of the row: an optimizer, a training
    column: str
    version: str
    word: str


def exact(row: Row) -> bool:
    """Whether a resume gave back what was saved, and the same steps; where their arithmetic changes, up to rounding."""
    if row["result"] == "bit-equal":
        return True
    split = (row["inner"], "-".join(row["optimizer"].split("-")[:2]), row["ranks"]) == SPLIT_DIFFERS
    size, _, loaded = row["result"].removeprefix("differs by ").partition(",")
    return split and loaded == " the loaded state is bit-equal" and float(size) < ROUNDING


def word(row: Row) -> str:
    """A result of megatron-core in a word or two."""
    result = str(row["result"])
    if exact(row):
        return "exact" if result == "bit-equal" else "exact state"
    kind, _, rest = result.partition(": ")
    if kind == "refused" or "flattened_range is not supported" in rest:
        return "refused"
    return rest.partition(":")[0] if kind.endswith("died") else "differs"


def family(row: Row) -> str:
    """The optimizer without its fraction of CPU offload and the overlap of copies."""
    optimizer = str(row["optimizer"])
    parts = ["offload"] if optimizer.startswith("hybrid") else []
    parts += ["precision-aware"] if "precision-aware" in optimizer else []
    return " + ".join([row["inner"], *parts])


@dataclass(frozen=True)
class Limit:
    """Of upstream, named on the page: why a resume with the fixes is neither exact nor refused."""

    word: str  # in the cells
    result: str  # how it begins
    oldest: str
    newest: str
    kinds: tuple[str, ...]
    format: str = ""  # or both

    def holds(self, row: Row) -> bool:
        """Whether it is what came of a row."""
        return (
            str(row["result"]).startswith(self.result)
            and numbers(self.oldest) <= numbers(row["version"]) <= numbers(self.newest)
            and kind_of(row) in self.kinds
            and row["format"].startswith(self.format)
        )


ONE_OR_TWO = ("stage1", "stage1_fp16", "stage2", "stage2_fp16")
STAGE3 = ("stage3", "stage3_fp16")
LIMITS = [
    Limit("no step", "training died: IndexError: list index out of range", "0.17.6", "0.18.2", ONE_OR_TWO),
    Limit("one group only", "conversion died: RuntimeError: start (", "0.14.5", "0.17.6", STAGE3, "universal"),
    Limit("no format", "conversion died: AssertionError: ", "0.12.0", "0.14.4", STAGE3, "universal"),
]


def limit(row: Row) -> Limit | None:
    """What of upstream's limits, if any, a row shows."""
    return next((one for one in LIMITS if one.holds(row)), None)


def zero_word(row: Row) -> str:
    """A result of DeepSpeed in a word or two."""
    known = limit(row)
    if known:
        return known.word
    kind, _, error = str(row["result"]).partition(": ")
    if error.startswith(OTHER_RANKS):
        return "refused"
    phase, _, died = kind.rpartition("died")
    if died or not kind.endswith("died"):
        return "differs" if kind.startswith("differs") else kind
    name = error.partition(":")[0]
    return f"{name} ({phase.strip()})" if phase else name


def zero_column(row: Row) -> str:
    if row["format"] == "universal":
        return "universal"
    return f"ordinary, {'same' if row['saved'] == row['ranks'] else 'other'} ranks"


def exceptions(results: Sequence[Result], known: Sequence[str]) -> str:
    """What was run, and what is not exact, a line for each word: rows, columns if not all of a row's, and releases."""
    columns: dict[str, set[str]] = {}
    found: dict[str, dict[str, list[Result]]] = {}
    for one in results:
        columns.setdefault(one.name, set()).add(one.column)
        if one.word != "exact":
            found.setdefault(one.word, {}).setdefault(one.name, []).append(one)
    lines = [f"**With the fixes**, {ranges({one.version for one in results}, known)}: exact, except", ""]
    for word, rows in found.items():
        places: dict[str, list[str]] = {}
        for name, of_row in rows.items():
            seen = {one.column for one in of_row}
            where = f", {' / '.join(sorted(seen))}" if seen != columns[name] else ""
            places.setdefault(f"{where}: {ranges({one.version for one in of_row}, known)}", []).append(name)
        texts = "; ".join(f"{' / '.join(names)}{place}" for place, names in places.items())
        lines.append(f"- {_emphasized(word)}: {texts}")
    return "\n".join(lines)


def _emphasized(word: str) -> str:
    """Bold for what no fix and no limit of upstream explains."""
    named = {"exact state", "refused", *(one.word for one in LIMITS)}
    return f"*{word}*" if word in named else f"**{word}**"


def table(head: str, results: Iterable[Result], columns: Mapping[str, str], known: Sequence[str]) -> str:
    """Results by rows and columns, each with its releases if a cell has several; equal rows are one.

    Args:
        columns: heads, by the columns of the results.
    """
    cells: dict[str, dict[str, dict[str, set[str]]]] = {}
    for one in results:
        words = cells.setdefault(one.name, {}).setdefault(one.column, {})
        words.setdefault(one.word, set()).add(one.version)
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, of_columns in cells.items():
        rows.setdefault(tuple(_cell(of_columns.get(column, {}), known) for column in columns), []).append(name)
    return generated.table([head, *columns.values()], [(" / ".join(names), *texts) for texts, names in rows.items()])


def _cell(words: Mapping[str, set[str]], known: Sequence[str]) -> str:
    every = set(chain.from_iterable(words.values()))
    return "; ".join(
        word if words[word] == every else f"{word} {ranges(words[word], known)}"
        for word in sorted(words, key=lambda word: (word != "exact", word.lower()))
    )


def megatron(record: Record) -> dict[str, str]:
    """The results of megatron-core, from the rows that each test recorded."""
    rows = sorted(chain.from_iterable(record.values()), key=lambda row: (family(row), numbers(row["version"])))
    known = KNOWN["megatron-core"]
    releases = {name: ranges({row["version"] for row in rows if row["format"] == name}, known) for name in FORMATS}
    heads = {name: f"`{name}` {versions}" for name, versions in releases.items() if versions}
    results = [(row, Result(family(row), row["format"], row["version"], word(row))) for row in rows]
    return _both("megatron-core", "optimizer", results, heads)


def zero(record: Record) -> dict[str, str]:
    """The results of DeepSpeed."""
    kinds = list(KINDS)
    rows = sorted(
        chain.from_iterable(record.values()), key=lambda row: (kinds.index(kind_of(row)), numbers(row["version"]))
    )
    results = [(row, Result(KINDS[kind_of(row)], zero_column(row), row["version"], zero_word(row))) for row in rows]
    heads = {name: name for name in sorted({one.column for _, one in results})}
    return _both("deepspeed", "training", results, heads)


def _both(name: str, head: str, results: Iterable[tuple[Row, Result]], heads: Mapping[str, str]) -> dict[str, str]:
    """What is not exact with the fixes, and all results without them."""
    of: dict[str, list[Result]] = {"hook": [], "none": []}
    for row, result in results:
        of[row["delivery"]].append(result)
    return {
        name: exceptions(of["hook"], KNOWN[name]),
        f"{name} without": table(head, of["none"], heads, KNOWN[name]),
    }


def kind_of(row: Row) -> str:
    """Of training: a case without its number of param groups."""
    return str(row["case"]).rpartition("-")[0]


def across(record: Record) -> dict[str, str]:
    """The results of pairs of releases: a line for each that saves, a column for each that loads."""
    rows = sorted(chain.from_iterable(record.values()), key=lambda row: numbers(row["saved_by"]))
    inner = sorted({row["inner"] for row in rows})
    heads = {version: version for version in sorted({row["version"] for row in rows}, key=numbers)}
    results = [
        Result(f"{row['saved_by']}, {row['format']}", row["version"], row["inner"], word(row))
        for row in rows
        if row["delivery"] == "hook"
    ]
    without = {name: {word(row) for row in rows if (row["delivery"], row["inner"]) == ("none", name)} for name in inner}
    end = "; ".join(f"*{name}*: {', '.join(sorted(words))}" for name, words in without.items())
    return {"across": f"{table('saved by', results, heads, inner)}\n\nWithout the fixes, {end}."}


def blocks() -> dict[str, str]:
    """All of it, from the records on the disk."""
    return {**megatron(read(RECORD)), **across(read(ACROSS)), **zero(read(ZERO))}


if __name__ == "__main__":
    generated.require(RECORD, ACROSS, ZERO)
    generated.write(PAGE, blocks())
