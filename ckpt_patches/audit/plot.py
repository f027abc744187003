"""A picture of where along its length each damaged array has its holes."""

from pathlib import Path
from typing import Any

from ckpt_patches.audit.audit import Report
from ckpt_patches.audit.damages import DAMAGE, NOTE
from ckpt_patches.errors import UserError

COLOURS = {DAMAGE: "#b2182b"}
SUSPECTED = "#ef8a62"
MOST_BARS = 200  # of a picture; more are not legible


def require() -> None:
    """Raise, before an audit of hours, if no picture can be drawn.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UserError("--plot needs matplotlib, which is not installed: pip install matplotlib") from None
    matplotlib.use("agg")  # a file, no window


def draw(reports: list[Report], to: Path) -> int:
    """Write the picture; how many arrays are in it."""
    from matplotlib import pyplot

    bars = [bar for report in reports for bar in _bars(report)][:MOST_BARS]
    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.3 * max(len(bars), 1)), layout="constrained")
    for number, (_, holes) in enumerate(bars):
        axes.broken_barh([(0, 1)], (number - 0.4, 0.8), facecolors="#dddddd")
        for begin, end, colour in holes:
            axes.broken_barh([(begin, end - begin)], (number - 0.4, 0.8), facecolors=colour)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=7)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="part of the shard's elements, in their order", title="Holes")
    figure.savefig(to, dpi=150)
    pyplot.close(figure)
    return len(bars)


def _bars(report: Report) -> list[tuple[str, list[tuple[float, float, Any]]]]:
    """For each damaged shard its label, and its holes as parts of its length."""
    sizes = {
        (stream.array, shard.label): shard.numel
        for shard in report.checkpoint.shards
        for stream in (*shard.streams.values(), *shard.lost.values())
    }
    bars: dict[str, list[tuple[float, float, Any]]] = {}
    for finding in report.findings:
        numel = sizes.get((finding.array, finding.shard))
        if finding.kind.severity != NOTE and numel and finding.begin is not None and finding.end is not None:
            label = f"{report.checkpoint.path.name}: {finding.array} {finding.shard}"
            hole = finding.begin / numel, finding.end / numel, COLOURS.get(finding.kind.severity, SUSPECTED)
            bars.setdefault(label, []).append(hole)
    return list(bars.items())
