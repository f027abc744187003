"""Write an HTML page: the answer first, then what is damaged and where. One self-contained file without scripts."""

import datetime
import html
from collections.abc import Iterable
from pathlib import Path

from ckpt_patches import __version__
from ckpt_patches.audit.audit import TO_RESUME_FROM, Report
from ckpt_patches.audit.ranges import Range, joined, overlap
from ckpt_patches.audit.report.rows import about, by_severity, headline, rows, summary, what_to_do
from ckpt_patches.audit.report.run_report import RunReport
from ckpt_patches.audit.report.text_report import COLORS, HEADS
from ckpt_patches.errors import UserError
from ckpt_patches.formats.damages import NOTE
from ckpt_patches.runtime.durable import replace_durably
from ckpt_patches.runtime.shown import printable

# Blocks loading and scripts, whatever a name in a checkpoint contains.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
CLASSES = {"red": "bad", "green": "good"}  # by the color of a verdict in a terminal; others are "doubt"
STYLE = """
:root { color-scheme: light dark; }
body { max-width: 70rem; margin: 0 auto; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; }
h2, h3, td, p { overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 0; }
h3 { font-size: 1rem; margin: 1rem 0 0; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #888; }
.answer { border: 2px solid; border-radius: .4rem; padding: .2rem 1rem; margin: 1rem 0; }
.strip { display: flex; flex-wrap: wrap; gap: .3rem; list-style: none; padding: 0; }
.strip li { padding: 0 .5rem; border-width: 2px; border-style: solid; border-radius: .2rem; font-size: .875rem; }
.strip .chosen { outline: 3px double currentColor; outline-offset: 2px; }
.good { border-color: #2a7; } .bad { border-color: #d33; } .doubt { border-color: #c90; }
.grid { overflow-x: auto; } .grid td.bad { background: #d337; text-align: right; }
"""
RANKS, PARAMETERS = 32, 40  # columns and rows of a grid at most


def require(to: Path) -> None:
    """Check before a long audit that the page can be written.

    Raises:
        UserError: the folder does not exist, or the path is not a file.
    """
    if not to.parent.is_dir():
        raise UserError(f"--html {to}: expected a folder {to.parent}, found none: make it first")
    if to.exists() and not to.is_file():
        raise UserError(f"--html {to}: expected a name for a file, found something else: choose another name")


def write(reports: list[Report], runs: list[RunReport], to: Path) -> None:
    """Write the page.

    Raises:
        UserError: it cannot be written; no partial file is left. The message has the file's name, not a temporary one.
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    try:
        replace_durably(to, page(reports, runs, f"{now:%Y-%m-%d %H:%M} UTC").encode("utf-8"))
    except OSError as error:
        raise UserError(f"{to}: cannot be written: {error.strerror}") from None


def page(reports: list[Report], runs: list[RunReport], made: str) -> str:
    """The HTML: the answer for each run, its saves by step, those that are not good, then the others as rows."""
    title = _text(headline(reports))
    by = f"By ckpt-patches audit {__version__}, {made}. What each verdict means: ckpt-patches explain audit"
    good = [report for report in reports if report.verdict in TO_RESUME_FROM]
    others = [report for report in reports if report.verdict not in TO_RESUME_FROM]
    cells = ((str(own.checkpoint.path), own.verdict, about(own), str(len(own.findings) or "")) for own in good)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{title}</h1>\n{''.join(map(_run, runs))}"
        f"{''.join(map(_checkpoint, others))}"
        + (f"<h2>Good</h2>{_table(('checkpoint', 'verdict', 'about', 'notes'), cells)}" if good else "")
        + f"<p>{_text(by)}</p></body></html>\n"
    )


def _run(run: RunReport) -> str:
    """What to resume from, and a box for each save, the oldest first, with its verdict: color alone is not for all."""
    answer, _, rest = run.as_text().partition("; ")
    look = "good" if run.newest else "doubt" if run.answer.undecided else "bad"
    boxes = (
        f'<li class="{CLASSES.get(COLORS.get(report.verdict, ""), "doubt")}{" chosen" * (report is run.newest)}">'
        f"{_text(f'{report.checkpoint.path.name} {report.verdict}')}</li>"
        for report in reversed(run.saves)
    )
    return (
        f'<div class="answer {look}"><h2>{_text(answer[0].upper() + answer[1:])}</h2><p>{_text(rest)}</p>'
        f"<p>{_text(run.not_whole())}</p>"
        f"{''.join(f'<p><code>{_text(step)}</code></p>' for step in run.next_steps())}</div>\n"
        f'<ul class="strip">{"".join(boxes)}</ul>\n'
    )


def _checkpoint(report: Report) -> str:
    """A checkpoint's verdict, what to do, its rows, notes included, and where on the ranks the damage is."""
    sentences = ((name, sentence.replace("`", "")) for name, sentence in what_to_do(report, notes=True))
    return (
        f"<h2>{_text(f'{report.checkpoint.path}: {report.verdict}')}</h2><p>{_text(about(report))}</p>\n"
        f"<p>{_text(summary(report))}</p>\n"
        + "".join(f"<p><strong>{_text(name)}</strong>: {_text(sentence)}</p>\n" for name, sentence in sentences)
        + "".join(
            _table((severity, *HEADS), ((row.kind.name, row.where, row.detail) for row in own))
            for severity, own in by_severity(rows(report, notes=True))
        )
        + _grid(report)
    )


def _grid(report: Report) -> str:
    """The share of each parameter's elements with findings, by the rank that wrote them; empty if that says nothing."""
    found = odd_by_rank(report)
    ranks = sorted({rank for by_rank in found.values() for rank in by_rank}, key=_number)
    if len(found) < 2 or len(ranks) < 2:
        return ""
    columns, lines = ranks[:RANKS], [*found.items()][:PARAMETERS]
    more = (
        ""
        if (columns, len(lines)) == (ranks, len(found))
        else f", {len(found)} parameters on {len(ranks)} ranks in all"
    )
    body = "".join(
        f"<tr><td>{_text(name)}</td>{''.join(_share(*by_rank.get(rank, (0, 0))) for rank in columns)}</tr>\n"
        for name, by_rank in lines
    )
    heads = _row(["parameter", *columns], "th")
    return f'<h3>Share of elements with findings{more}</h3><div class="grid"><table>{heads}{body}</table></div>\n'


def odd_by_rank(report: Report) -> dict[str, dict[str, tuple[int, int]]]:
    """By parameter and rank: the elements in ranges of findings, and all elements. Only parameters with findings."""
    ranges: dict[tuple[str, str], list[Range]] = {}
    for own in report.findings:
        if own.begin is not None and own.end is not None and own.kind.severity != NOTE:
            ranges.setdefault((own.array, own.shard), []).append((own.begin, own.end))
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for shard in report.checkpoint.shards:
        odd = joined(one for own in shard.streams.values() for one in ranges.get((own.array, shard.label), ()))
        for owner in shard.owners if odd else ():
            there = overlap(odd, owner.begin, owner.end)
            known = found.setdefault(shard.parameter, {}).get(owner.rank, (0, 0))
            found[shard.parameter][owner.rank] = (known[0] + there, known[1] + owner.end - owner.begin)
    return found


def _number(rank: str) -> tuple[int, str]:
    return int("".join(filter(str.isdecimal, rank)) or -1), rank


def _share(odd: int, every: int) -> str:
    return f'<td class="bad">{max(odd / every, 0.01):.0%}</td>' if odd else "<td></td>"


def _table(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    return f"<table>{_row(heads, 'th')}{''.join(map(_row, lines))}</table>\n"


def _row(cells: Iterable[str], element: str = "td") -> str:
    return f"<tr>{''.join(f'<{element}>{_text(cell)}</{element}>' for cell in cells)}</tr>\n"


def _text(text: str) -> str:
    return html.escape(printable(text), quote=True)
