"""Write an HTML page with the verdicts, and what to do about each finding.

The page is one self-contained file without scripts.
"""

import datetime
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckpt_patches import __version__
from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, REPAIRED, UNKNOWN, WHOLE, Report
from ckpt_patches.audit.report.markup import Markup, element, joined
from ckpt_patches.audit.report.text_report import in_range
from ckpt_patches.errors import UserError
from ckpt_patches.formats import damages
from ckpt_patches.formats.damages import DAMAGE, NOTE, SUSPICION, Finding, FindingKind
from ckpt_patches.runtime.durable import replace_durably
from ckpt_patches.runtime.units import in_bytes

HEADS = ("Verdict", "Checkpoint", "Format", "Size", "Step", "Ranks")
FEW = 12  # findings of a checkpoint; more are collapsed
# The CSS class of each verdict, worst first.
VERDICTS = {DAMAGED: "bad", INCOMPLETE: "bad", UNKNOWN: "odd", REPAIRED: "good", WHOLE: "good"}
SEVERITIES = {DAMAGE: "bad", damages.INCOMPLETE: "bad", SUSPICION: "odd", NOTE: "note"}
# Blocks loading and scripts, whatever a name in a checkpoint contains.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE = Markup("""
:root { color-scheme: light dark; --text: #1c1e21; --soft: #5b6168; --ground: #fff; --edge: #d5d8dc;
  --bad: #b3261e; --odd: #8a5a00; --good: #1b6e3c; --note: #5b6168; --link: #0b57d0; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e6e9; --soft: #a3a9b0; --ground: #16181b;
  --edge: #3a3e44; --bad: #ff8f85; --odd: #f0bf5c; --good: #7bd49b; --note: #a3a9b0; --link: #8ab4f8; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; margin: .5rem 0 0; }
h2 { font-size: 1.25rem; margin: 0; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
p { margin: .4rem 0; }
a { color: var(--link); }
section { border: 1px solid var(--edge); border-radius: .5rem; padding: 1rem; margin: 1.5rem 0; }
.soft { color: var(--soft); font-size: .875rem; overflow-wrap: anywhere; }
.bad { color: var(--bad); } .odd { color: var(--odd); } .good { color: var(--good); } .note { color: var(--note); }
.verdict { font-weight: 700; white-space: nowrap; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--edge); }
th { color: var(--soft); font-weight: 600; }
.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
.name { overflow-wrap: anywhere; min-width: 11rem; }
code { font: .9em ui-monospace, monospace; overflow-wrap: anywhere; }
details { border-top: 1px solid var(--edge); padding: .4rem 0; }
summary { cursor: pointer; }
summary code { font-weight: 600; }
tbody tr:last-child td { border-bottom: 0; }
@media (max-width: 40rem) {
  thead { display: none; }
  tr { display: block; border-bottom: 1px solid var(--edge); padding: .4rem 0; }
  tr:last-child { border-bottom: 0; }
  td { display: inline; border: 0; padding: 0 .6rem 0 0; }
  td.name { display: block; }
  td:not(.name):not(:empty)[data-label]::before { content: attr(data-label) " "; color: var(--soft); }
}
""")


def require(to: Path) -> None:
    """Check before a long audit that the page can be written.

    Raises:
        UserError: the folder does not exist, or the path is not a file.
    """
    if not to.parent.is_dir():
        raise UserError(f"--html {to}: expected a folder {to.parent}, found none: make it first")
    if to.exists() and not to.is_file():
        raise UserError(f"--html {to}: expected a name for a file, found something else: choose another name")


def write(reports: list[Report], to: Path) -> None:
    """Write the page.

    Raises:
        OSError: it cannot be written; no partial file is left.
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    replace_durably(to, page(reports, f"{now:%Y-%m-%d %H:%M} UTC").encode("utf-8"))


def page(reports: list[Report], made: str) -> str:
    """The HTML; `made` is the time to show."""
    title = headline(reports)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", STYLE),
    )
    by = (
        f"By ckpt-patches audit {__version__}, {made}. What each verdict means, and what is not detected: "
        "ckpt-patches explain audit"
    )
    body = element(
        "main",
        element("h1", title),
        element("p", by, class_="soft"),
        _table(HEADS, (_row(number, report) for number, report in enumerate(reports))),
        *(_checkpoint(number, report) for number, report in enumerate(reports)),
    )
    return f'<!doctype html>\n<html lang="en">{head}<body>{body}</body></html>\n'


def headline(reports: list[Report]) -> str:
    """The number of checkpoints with each verdict, worst first."""
    verdicts = [report.verdict for report in reports]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in verdicts]
    return f"{len(reports)} checkpoint{'s' * (len(reports) != 1)}: {', '.join(counts)}"


def _table(heads: Iterable[str], rows: Iterable[Markup]) -> Markup:
    head = element("tr", *(element("th", head, scope="col") for head in heads))
    return element("div", element("table", element("thead", head), element("tbody", *rows)), class_="wide")


def _row(number: int, report: Report) -> Markup:
    found = report.checkpoint
    return element(
        "tr",
        element("td", _verdict(report)),
        element("td", element("a", str(found.path), href=f"#checkpoint-{number}"), class_="name"),
        element("td", found.format),
        element("td", in_bytes(found.nbytes), class_="number"),
        element("td", _known(found.step), class_="number", data_label="step"),
        element("td", _known(found.data_parallel), class_="number", data_label="ranks"),
    )


def _known(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _verdict(report: Report) -> Markup:
    return element("span", report.verdict, class_=f"verdict {VERDICTS[report.verdict]}")


def _checkpoint(number: int, report: Report) -> Markup:
    return element(
        "section",
        element("h2", report.checkpoint.path.name, ": ", _verdict(report)),
        element("p", str(report.checkpoint.path), class_="soft"),
        *_findings(report),
        id=f"checkpoint-{number}",
    )


# The findings


def _findings(report: Report) -> Iterator[Markup]:
    """The findings by kind, collapsed if there are many; all notes collapsed together."""
    by_kind: dict[FindingKind, list[Finding]] = {}
    for finding in report.findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    kinds = sorted(by_kind, key=lambda kind: list(SEVERITIES).index(kind.severity))
    wrong = [kind for kind in kinds if kind.severity != NOTE]
    notes = [kind for kind in kinds if kind.severity == NOTE]
    are_few = sum(len(by_kind[kind]) for kind in wrong) <= FEW
    if wrong:
        yield element("h3", "Findings")
    for kind in wrong:
        yield _kind(kind, by_kind[kind], is_open=are_few)
    if notes:
        number = sum(len(by_kind[kind]) for kind in notes)
        summary = element("summary", f"{number:,} note{'s' * (number != 1)}, which are no damage", class_="note")
        yield element("details", summary, *(_kind(kind, by_kind[kind], is_open=False) for kind in notes))


def _kind(kind: FindingKind, findings: list[Finding], *, is_open: bool) -> Markup:
    severity = element("span", kind.severity, class_=SEVERITIES[kind.severity])
    places = f", {len(findings):,} place{'s' * (len(findings) != 1)}"
    return element(
        "details",
        element("summary", severity, " ", element("code", kind.name), places),
        element("p", element("strong", "What it means: "), _with_code(kind.meaning), "."),
        element("p", element("strong", "What to do: "), _with_code(kind.remedy), "."),
        _table(("Array or file", "Shard", "Elements", "Detail"), map(_finding, findings)),
        open=True if is_open else None,
    )


def _with_code(text: str) -> Markup:
    """Show the text between backticks as code."""
    parts = text.split("`")
    return joined(*(element("code", part) if number % 2 else part for number, part in enumerate(parts)))


def _finding(finding: Finding) -> Markup:
    return element(
        "tr",
        element("td", element("code", finding.array), class_="name"),
        element("td", finding.shard, data_label="shard"),
        element("td", in_range(finding), class_="number", data_label="elements"),
        element("td", finding.detail),
    )
