"""Write the tables and the picture of docs/scale.md from what tests/benchmarks/test_scale.py has counted.

python tests/scale_page.py
"""

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from upstream import REPOSITORY

RECORD = REPOSITORY / "tests" / "recorded" / "scale.json"
OF_FIXES = RECORD.with_name("scale_fixes.json")  # of each fix alone
OF_CASES = RECORD.with_name("scale_cases.json")  # of what comes to its end with a fix only
PAGE = REPOSITORY / "docs" / "scale.md"
PICTURE = REPOSITORY / "docs" / "scale.svg"
BEGIN, END = "<!-- counted: by `make bench` -->", "<!-- counted: end -->"
BEGIN_FIXES, END_FIXES = "<!-- each fix: by `make bench` -->", "<!-- each fix: end -->"

Row = dict[str, Any]
Sweeps = dict[tuple[str, str, str], list[dict[str, Row]]]
MEASURES = ("messages", "bytes", "opened", "created", "metadata", "written")
# What a size is varied in, by the heading of its column; the others are as in the middle one.
VARIED = {"ranks": "ranks", "layers": "layers", "hidden": "hidden size", "chunks": "chunks"}


@dataclass(frozen=True)
class Size:
    """Of a run; what it has no use for is left as it is."""

    ranks: int = 4
    layers: int = 4
    hidden: int = 64  # elements: the square of it to a layer
    chunks: int = 64  # of zarr


USUAL = vars(Size())
RANKS = [Size(ranks=ranks) for ranks in (2, 4, 8)]
PARAMETERS = [Size(layers=layers) for layers in (2, 4, 8)]
BYTES = [Size(hidden=hidden) for hidden in (32, 64, 128)]
OF_A_RUN = list(dict.fromkeys([*RANKS, *PARAMETERS, *BYTES]))
OF_CHUNKS = list(dict.fromkeys([*RANKS, *(Size(chunks=chunks) for chunks in (16, 64, 1024))]))
LARGE = Size(ranks=8, layers=8, hidden=128, chunks=1024)  # larger in all


def row(release: str, part: str, size: Size, side: str, of_ranks: Sequence[Mapping[str, int]]) -> Row:
    """What the ranks of one run did: all of them, and the one that did most."""
    counts = {name: [sum(rank[name] for rank in of_ranks), max(rank[name] for rank in of_ranks)] for name in MEASURES}
    return {"release": release, "part": part, **vars(size), "side": side, **counts}


def record(name: str, rows: Iterable[Row], to: Path = RECORD) -> None:
    """Put one set of runs into a record."""
    found = json.loads(to.read_text()) if to.exists() else {}
    found[name] = list(rows)
    sets = [f"{json.dumps(key)}: [\n" + ",\n".join(map(json.dumps, found[key])) + "\n]" for key in sorted(found)]
    to.write_text("{\n" + ",\n".join(sets) + "\n}\n")


def recorded(of: Path = RECORD) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = json.loads(of.read_text())
    return found


def sweeps(rows: Sequence[Row]) -> dict[tuple[str, str], list[dict[str, Row]]]:
    """By part and what is varied: in the order of that size, the rows of the two sides."""
    found: dict[tuple[str, str], list[dict[str, Row]]] = {}
    for part in dict.fromkeys(row["part"] for row in rows):
        for varied in VARIED:
            others = {name: usual for name, usual in USUAL.items() if name != varied}
            chosen = [one for one in rows if one["part"] == part and others.items() <= one.items()]
            sizes = sorted({one[varied] for one in chosen})
            if len(sizes) > 1:
                found[part, varied] = [{one["side"]: one for one in chosen if one[varied] == size} for size in sizes]
    return found


def faster(sweep: Sequence[Mapping[str, Row]], fix: str = "") -> list[str]:
    """Where ours grows faster than upstream's: more at the largest size, by more than at the smallest, and more times.

    With a fix that saves or loads what upstream leaves out it may be as many times as much as that comes to.
    """
    first, last = sweep[0], sweep[-1]
    if "upstream" not in first:
        return []
    found = []
    for name, number in itertools.product(MEASURES, (0, 1)):
        (before, _), (after, upstream) = (
            [one[side][name][number] for side in ("ours", "upstream")] for one in (first, last)
        )
        least = first["upstream"][name][number]
        more, times = max(before - least, 0), max(before / least, MORE_STATES.get(fix, 1)) if least else 1
        ranks = 1 if name == "messages" and number else last["ours"]["ranks"]
        if after > max(upstream * SAME + more + ALLOWED.get(name, 0) * ranks, upstream * times * SAME):
            found.append(f"{name} of {('all ranks', 'one rank')[number]}: {after:,}, upstream {upstream:,}")
    return found


# Fixes whose own code these programs run in some parts alone, by what is in a part's name, or in none: for these, and
# for the releases without such a part, there are runs of their own (OF_CASES), or none.
RUN_IN = {"async_save_staging": "in the background"}
OF_THEIR_OWN = (
    "dp_zero_empty_state",
    "hybrid_offload_reload",
    "hybrid_offload_resume",
    "numpy2_product",
    "override_learning_rate",
    "sharding_type_default",
    "universal_experts",
)
# Which of two ranks comes first is chance, and so who makes a file.
SAME = 1.05
VARIES = 0.1  # of what one release writes from run to run, by which no fix is told from upstream
# How many times as much a release saves or loads with a fix, at most: of two param groups upstream reads the moments of
# the first one; it leaves out masters and moments in fp32 beside weights in bf16; under CPU offload its state has
# `master_param` beside a parameter and two moments.
MORE_STATES = {
    "optimizer_state_links": 2,
    "universal_all_moments": 2,
    "bf16_stage0_state": 7,
    "hybrid_offload_resume": 4 / 3,
}
# For each rank: a barrier; the bytes of a sum of failures twice, in place of barriers; some that Gloo's sockets write.
ALLOWED = {"messages": 1, "bytes": 16, "written": 1024}


# Each fix alone


def others(rows: Sequence[Row]) -> list[str]:
    """The fixes of a release with which, at any size, a count is another than upstream's."""
    return list(dict.fromkeys(fix for fix, _ in different(rows)))


def different(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Of a release the fixes, and the parts in which a count is another with the fix alone."""
    upstream = {key(one): one for one in rows if not one["fix"]}
    found = [(one["fix"], one["part"]) for one in rows if one["fix"] and not alike(one, upstream[key(one)])]
    return list(dict.fromkeys(found))


def key(of: Row) -> tuple[str, ...]:
    """What rows of the two sides have in common."""
    return of["part"], *(str(of[name]) for name in VARIED)


def alike(ours: Row, upstream: Row) -> bool:
    """All that is counted is the same; who makes a file that several use, and what sockets write, varies."""
    if any(ours[name] != upstream[name] for name in ("messages", "bytes", "metadata")):
        return False
    if any(ours[name][0] != upstream[name][0] for name in ("opened", "created")):  # of all ranks
        return False
    some = [ALLOWED["written"] * ours["ranks"], ALLOWED["written"]]
    pairs = zip(ours["written"], upstream["written"], some, strict=True)
    return all(abs(found - own) <= max(own * VARIES, more) for found, own, more in pairs)


def sweeps_of_fixes(release: str) -> Sweeps:
    """By fix, part and what is varied, where a count in a release is another than upstream's: both sides' rows."""
    rows = recorded(OF_FIXES)[release]
    found = {}
    for fix, part in different(rows):
        sides = [one for one in rows if one["part"] == part and one["fix"] in (fix, "")]
        found.update({(fix, part, varied): sweep for (_, varied), sweep in sweeps(sides).items()})
    return found


def sweeps_of_cases(release: str) -> Sweeps:
    """By fix, part and what is varied, what comes to its end in a release with a fix only: both sides' rows."""
    rows = recorded(OF_CASES).get(release, [])
    found = {}
    for fix in dict.fromkeys(one["fix"] for one in rows):
        of_fix = sweeps([one for one in rows if one["fix"] == fix])
        found.update({(fix, part, varied): sweep for (part, varied), sweep in of_fix.items()})
    return found


def was_run(fix: str, rows: Sequence[Row]) -> bool:
    """Whether a part of these counts runs the code of a fix."""
    parts = [one["part"] for one in rows if one["fix"] == fix]
    if fix in RUN_IN:
        return any(RUN_IN[fix] in part for part in parts)
    return fix not in OF_THEIR_OWN


def tables_of_fixes() -> str:
    found = []
    for release, rows in recorded(OF_FIXES).items():
        alone = dict.fromkeys(one["fix"] for one in rows if one["fix"] and one["fix"] not in others(rows))
        cases = sweeps_of_cases(release)
        same = [f"`{fix}`" for fix in alone if was_run(fix, rows)]
        not_run = [f"`{fix}`" for fix in alone if not was_run(fix, rows) and fix not in {of for of, *_ in cases}]
        parts = ", ".join(dict.fromkeys(one["part"] for one in rows))
        found.append(f"### {rows[0]['release']}, each fix alone")
        found.append(f"Counted: {parts}. All counts as upstream's: {', '.join(same) or 'none'}.")
        if not_run:
            found.append(f"Not counted in this release: {', '.join(not_run)}.")
        found += by_size(sweeps_of_fixes(release))
        if cases:
            found.append("In runs of their own, and in brackets the nearest to them that upstream can do:")
            found += by_size(cases)
    return "\n\n".join(found)


def by_size(sweeps: Sweeps) -> Iterator[str]:
    """A table for each size that is varied; of the sweeps by fix, part and that."""
    for varied in VARIED:
        chosen = {f"`{fix}`: {part}": sweep for (fix, part, by), sweep in sweeps.items() if by == varied}
        if chosen:
            yield table(varied, chosen)


# The page


def table(varied: str, of_parts: Mapping[str, Sequence[Mapping[str, Row]]]) -> str:
    """A line for what all ranks of a part do, and one for the rank that does most."""
    sizes = list(dict.fromkeys(sides["ours"][varied] for sweep in of_parts.values() for sides in sweep))
    head = [f"by {VARIED[varied]}: {listed(sizes)}", *MEASURES]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for part, sweep in of_parts.items():
        of_all, of_one = ([cell(sweep, name, number) for name in MEASURES] for number in (0, 1))
        if of_all == of_one:  # of a tool, which is one process
            lines.append(f"| {part} | {' | '.join(of_all)} |")
        else:
            lines.append(f"| {part}, all ranks | {' | '.join(of_all)} |")
            lines.append(f"| {part}, one rank | {' | '.join(of_one)} |")
    return "\n".join(lines)


def cell(sweep: Sequence[Mapping[str, Row]], name: str, number: int) -> str:
    """A count at every size, and in brackets upstream's where they are others."""
    sides = {side: listed([one[side][name][number] for one in sweep]) for side in sweep[0]}
    upstream = sides.get("upstream", sides["ours"])
    return sides["ours"] if sides["ours"] == upstream else f"{sides['ours']} ({upstream})"


def listed(numbers: Sequence[int]) -> str:
    """In a row; one alone where all are the same."""
    return " · ".join(f"{number:,}" for number in (numbers if len(set(numbers)) > 1 else numbers[:1]))


def tables() -> str:
    found = []
    for rows in recorded().values():
        found.append(f"### {rows[0]['release']}")
        by_varied: dict[str, dict[str, list[dict[str, Row]]]] = {}
        for (part, varied), sweep in sweeps(rows).items():
            by_varied.setdefault(varied, {})[part] = sweep
        found += [table(varied, of_parts) for varied, of_parts in by_varied.items()]
    return "\n\n".join(found)


def write() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for (begin, end), made in (((BEGIN, END), tables()), ((BEGIN_FIXES, END_FIXES), tables_of_fixes())):
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{made}\n\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text, encoding="utf-8")
    draw()


PANELS = (
    ("zarr strategy", "save", "chunks", "created", 1, "files that the busiest rank creates, zarr save"),
    ("zarr strategy", "save", "chunks", "metadata", 0, "other metadata operations, zarr save"),
    ("megatron-core 0.19.2", "torch, save", "ranks", "messages", 0, "messages, save in the format torch"),
    ("megatron-core 0.19.2", "fully_reshardable, save", "ranks", "messages", 0, "messages, fully_reshardable"),
    ("DeepSpeed 0.19.8", "stage 1, conversion", "ranks", "opened", 0, "files opened, universal conversion"),
    ("DeepSpeed 0.19.8", "stage 3, universal load", "layers", "opened", 1, "files one rank opens, universal load"),
)


def draw() -> None:
    """Ours and upstream's in small pictures; what grows in proportion is a straight line through the origin."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "scale"  # the same picture of the same figures
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6.5), layout="constrained")
    for axis, (name, part, varied, measure, number, title) in zip(axes.flat, PANELS, strict=True):
        sweep = sweeps(recorded()[name])[part, varied]
        for side, style in {"upstream": {"color": "#b04030", "marker": "s"}, "ours": {"color": "#2060a0"}}.items():
            values = [sides[side][measure][number] for sides in sweep]
            axis.plot([sides[side][varied] for sides in sweep], values, label=side, **{"marker": "o", **style})
        sizes = [sides["ours"][varied] for sides in sweep]
        scale = "log" if sizes[-1] > 100 * sizes[0] else "linear"
        axis.set(xscale=scale, yscale=scale, title=title, xlabel=VARIED[varied])
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axis.set_xticks([], minor=True)
        if scale == "linear":
            axis.set(xlim=(0, None), ylim=(0, None))
        axis.grid(alpha=0.3)
    axes.flat[0].legend()
    figure.savefig(PICTURE, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    write()
    print(f"wrote {PAGE}")
