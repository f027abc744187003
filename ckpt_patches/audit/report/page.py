"""Write an HTML page with the verdicts and the same rows as the text. One self-contained file without scripts."""

import datetime
import html
from collections.abc import Iterable
from pathlib import Path

from ckpt_patches import __version__
from ckpt_patches.audit.audit import Report
from ckpt_patches.audit.report.rows import Row, by_severity, headline, rows, summary, what_to_do
from ckpt_patches.audit.report.text_report import HEADS, about
from ckpt_patches.errors import UserError
from ckpt_patches.runtime.durable import replace_durably
from ckpt_patches.runtime.shown import printable

# Blocks loading and scripts, whatever a name in a checkpoint contains.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE = """
:root { color-scheme: light dark; }
body { max-width: 70rem; margin: 0 auto; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; }
h2, td { overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 0; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #888; }
"""


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
        UserError: it cannot be written; no partial file is left. The message has the file's name, not a temporary one.
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    try:
        replace_durably(to, page(reports, f"{now:%Y-%m-%d %H:%M} UTC").encode("utf-8"))
    except OSError as error:
        raise UserError(f"{to}: cannot be written: {error.strerror}") from None


def page(reports: list[Report], made: str) -> str:
    """The HTML; `made` is the time to show."""
    title = _text(headline(reports))
    by = f"By ckpt-patches audit {__version__}, {made}. What each verdict means: ckpt-patches explain audit"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{title}</h1><p>{_text(by)}</p>\n{''.join(map(_checkpoint, reports))}</body></html>\n"
    )


def _checkpoint(report: Report) -> str:
    """A checkpoint's verdict, its rows, notes included, and what to do."""
    sections = (_table(severity, own) for severity, own in by_severity(rows(report, notes=True)))
    sentences = ((name, sentence.replace("`", "")) for name, sentence in what_to_do(report, notes=True))
    return (
        f"<h2>{_text(f'{report.checkpoint.path}: {report.verdict}')}</h2><p>{_text(about(report))}</p>\n"
        f"<p>{_text(summary(report))}</p>\n{''.join(sections)}"
        + "".join(f"<p><strong>{_text(name)}</strong>: {_text(sentence)}</p>\n" for name, sentence in sentences)
    )


def _table(severity: str, found: list[Row]) -> str:
    cells = ((row.kind.name, row.where, row.detail) for row in found)
    return f"<table>{_row((severity, *HEADS), 'th')}{''.join(map(_row, cells))}</table>\n"


def _row(cells: Iterable[str], element: str = "td") -> str:
    return f"<tr>{''.join(f'<{element}>{_text(cell)}</{element}>' for cell in cells)}</tr>\n"


def _text(text: str) -> str:
    return html.escape(printable(text), quote=True)
