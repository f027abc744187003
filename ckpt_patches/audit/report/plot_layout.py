"""Plan the picture of holes: which arrays are drawn, damaged ones first, and where their findings lie.

`plot` draws the plan with matplotlib, and `page` as a part of a page.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckpt_patches.audit.audit import Report
from ckpt_patches.audit.damages import DAMAGE, KINDS, NOTE, UNREADABLE, Finding
from ckpt_patches.audit.readers.checkpoint import Shard
from ckpt_patches.audit.report.text_report import about, in_range
from ckpt_patches.runtime.shown import printable

MOST_BARS = 40  # per checkpoint; more are not legible
MOST_BOUNDARIES = 128  # per bar; more would be a gray area
LEAST_WIDTH = 0.004  # of a mark, as a fraction of the bar: one element of a billion is visible

# Of findings in arrays. Green is not used: it is for complete checkpoints. Kinds that occur together have distinct
# colors.
COLOURS = {
    "lost_master": "#c0392b",
    "lost_moment": "#e08214",
    "no_moments": "#8c510a",
    "parameter_without_moments": "#bf9a5f",
    "unrounded_master": "#7b3294",
    "other_masters": "#9e9ac8",
    "shifted_state": "#c2539b",
    "not_finite": "#1f1fd0",
    "odd_in_bucket": "#74a9e8",
    "negative_square": "#e7298a",
    "missing_chunk": "#7f0000",
    "short_chunk": "#ef3b2c",
    "long_chunk": "#fc9272",
    "bad_file": "#d7003a",
}
OTHER = "#8a8a8a"
INEXACT = 0.35  # the opacity of a finding without a range

Key = tuple[str, str]  # names of an array and its shard


@dataclass(frozen=True)
class Mark:
    """The position of a finding along an array, in fractions of its length."""

    begin: float
    end: float
    finding: Finding
    is_exact: bool  # False: the finding has no range and covers the array


@dataclass(frozen=True)
class Bar:
    """One array's shard."""

    label: str
    boundaries: tuple[float, ...]  # of data-parallel ranks' parts, in fractions of its length
    marks: tuple[Mark, ...]  # in drawing order: narrow ones over wide ones


@dataclass(frozen=True)
class Panel:
    """One checkpoint."""

    title: str
    bars: tuple[Bar, ...]
    rest: tuple[str, ...]  # what is not drawn, one line each


def panel(report: Report) -> Panel:
    """The damaged arrays of a checkpoint, worst first, and the number of others."""
    shards = _shards(report)
    found = _by_array(report, shards)
    bars = [_bar(key, shards[key], own, report.checkpoint.data_parallel) for key, own in found.items()]
    bars.sort(key=lambda bar: (not _is_damaged(bar), -_share(bar)))  # ties in the order of the findings
    placed = sum(map(len, found.values()))
    wrong = sum(finding.kind.severity != NOTE for finding in report.findings)
    return Panel(
        f"{printable(report.checkpoint.path.name)}: {report.verdict.upper()} ({about(report)})",
        tuple(bars[:MOST_BARS]),
        tuple(_rest(len(bars) - MOST_BARS, len(shards) - len(bars), _others(report), wrong - placed)),
    )


def colour(kind: str) -> str:
    """The color of a kind of finding."""
    return COLOURS.get(kind, OTHER)


def legend(panels: Iterable[Panel]) -> list[tuple[str, str]]:
    """The kinds that are drawn, in the order of `damages.KINDS`, with their colors."""
    drawn = {mark.finding.kind.name for panel in panels for bar in panel.bars for mark in bar.marks}
    return [(kind, colour(kind)) for kind in KINDS if kind in drawn]


def explained(finding: Finding) -> str:
    """A finding in one line."""
    return printable(" ".join(filter(None, (finding.kind.name, in_range(finding), finding.detail))))


def _shards(report: Report) -> dict[Key, Shard]:
    return {
        (stream.array, shard.label): shard
        for shard in report.checkpoint.shards
        for stream in (*shard.streams.values(), *shard.lost.values())
        if shard.numel
    }


def _by_array(report: Report, shards: dict[Key, Shard]) -> dict[Key, list[Finding]]:
    """The findings by array, without notes; a missing file is in no array."""
    found: dict[Key, list[Finding]] = {}
    for finding in report.findings:
        key = finding.array, finding.shard
        if finding.kind.severity != NOTE and key in shards:
            found.setdefault(key, []).append(finding)
    return found


def _bar(key: Key, shard: Shard, findings: list[Finding], data_parallel: int | None) -> Bar:
    marks = tuple(
        sorted((_mark(f, shard.numel) for f in findings), key=lambda mark: (mark.is_exact, mark.begin - mark.end))
    )
    label = printable(" ".join(filter(None, key)))
    return Bar(label, boundaries(shard, findings, data_parallel), tuple(marks))


def _mark(finding: Finding, numel: int) -> Mark:
    if finding.begin is None or finding.end is None:
        return Mark(0.0, 1.0, finding, is_exact=False)
    begin, end = finding.begin / numel, finding.end / numel
    wider = max(LEAST_WIDTH - (end - begin), 0.0)
    begin = min(max(begin - wider / 2, 0.0), 1 - LEAST_WIDTH)
    return Mark(begin, min(max(end, begin + LEAST_WIDTH), 1.0), finding, is_exact=True)


def boundaries(shard: Shard, findings: Iterable[Finding], data_parallel: int | None) -> tuple[float, ...]:
    """The boundaries between ranks' parts, from the files or from an even division that a finding fits."""
    places = [owner.begin for owner in shard.owners]
    if not places and data_parallel and shard.numel % data_parallel == 0:
        part = shard.numel // data_parallel
        places = list(range(0, shard.numel, part)) if any(_fits(f, part, shard.numel) for f in findings) else []
    inner = [place / shard.numel for place in places if 0 < place < shard.numel]
    return tuple(inner) if len(inner) <= MOST_BOUNDARIES else ()


def _fits(finding: Finding, part: int, numel: int) -> bool:
    edges = finding.begin, finding.end
    return edges != (0, numel) and all(edge is not None and edge % part == 0 for edge in edges)


def _is_damaged(bar: Bar) -> bool:
    return any(mark.finding.kind.severity == DAMAGE for mark in bar.marks)


def _share(bar: Bar) -> float:
    return sum(mark.end - mark.begin for mark in bar.marks)


def _others(report: Report) -> str:
    """A name for the arrays without findings: they may be damaged if not all was read."""
    return "arrays without a finding" if any(f.kind is UNREADABLE for f in report.findings) else "whole arrays"


def _rest(undrawn: int, others: int, what: str, without_place: int) -> Iterator[str]:
    if undrawn > 0:
        yield f"and {undrawn:,} more with findings"
    if others:
        yield f"and {others:,} {what if others > 1 else what.replace('arrays', 'array')}"
    if without_place:
        yield f"and {without_place:,} finding{'s' * (without_place > 1)} of no single array"
