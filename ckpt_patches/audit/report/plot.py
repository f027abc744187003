"""Draw the holes with matplotlib: where the findings lie along each damaged array."""

import io
from pathlib import Path
from typing import Any

from ckpt_patches.audit.audit import TO_RESUME_FROM, Report
from ckpt_patches.audit.report.plot_layout import INEXACT, Bar, Panel, colour, legend, panel
from ckpt_patches.errors import UserError
from ckpt_patches.runtime.durable import replace_durably

MOST_PANELS = 12  # checkpoints per picture; more are not legible
LONGEST_LABEL = 60  # characters
BAR = 0.26  # inches
ARRAY, BOUNDARY = "#dddddd", "#303030"


def require(to: Path) -> None:
    """Check before a long audit that a picture can be drawn.

    Raises:
        UserError: matplotlib is not installed, or does not support the file's extension.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UserError("--plot needs matplotlib, which is not installed: pip install matplotlib") from None
    matplotlib.use("agg")  # a file, no window
    from matplotlib.figure import Figure

    known = sorted(Figure().canvas.get_supported_filetypes())
    if to.suffix.lstrip(".").lower() not in known:
        raise UserError(f"--plot {to}: expected a file that ends in one of .{', .'.join(known)}")


def draw(reports: list[Report], to: Path) -> int:
    """Write the picture. Returns the number of arrays in it.

    Raises:
        OSError: it cannot be written; no partial file is left.
    """
    panels = [panel(report) for report in reports if report.verdict not in TO_RESUME_FROM]
    replace_durably(to, picture(panels[:MOST_PANELS], rest(len(reports), panels), to.suffix.lstrip(".").lower()))
    return sum(len(drawn.bars) for drawn in panels[:MOST_PANELS])


def rest(checkpoints: int, panels: list[Panel]) -> str:
    """Describe the checkpoints that are not in the picture."""
    whole, more = checkpoints - len(panels), len(panels) - MOST_PANELS
    parts = [f"{more:,} more that are not complete"] * (more > 0)
    parts += [f"{whole:,} complete checkpoint{'s' * (whole > 1)}"] * (whole > 0)
    return f"and {' and '.join(parts)}" if parts else ""


def picture(panels: list[Panel], rest: str, kind: str) -> bytes:
    """The bytes of a file of this kind, such as "png". PNG and SVG are deterministic."""
    import matplotlib
    from matplotlib.figure import Figure

    lines = [len(drawn.bars) + len(drawn.rest) for drawn in panels]
    with matplotlib.rc_context({"svg.hashsalt": "holes"}):
        figure = Figure(figsize=(10, 0.8 + sum(BAR * count + 0.65 for count in lines)), layout="constrained")
        if panels:
            heights = {"height_ratios": [count + 1 for count in lines]}
            axes: Any = figure.subplots(len(panels), squeeze=False, gridspec_kw=heights)[:, 0]
            for axis, drawn in zip(axes, panels, strict=True):
                _draw_panel(axis, drawn)
            axes[-1].set_xlabel("part of the shard's elements, in their order; lines: data-parallel ranks' parts")
        _draw_legend(figure, panels)
        figure.supxlabel(rest, fontsize=8.5)
        made = io.BytesIO()
        figure.savefig(made, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return made.getvalue()


def _draw_panel(axis: Any, drawn: Panel) -> None:
    for number, bar in enumerate(drawn.bars):
        _draw_bar(axis, number, bar)
    labels = [*(_shortened(bar.label) for bar in drawn.bars), *drawn.rest]
    # Without parse_math=False, matplotlib reads text between dollar signs as a formula.
    axis.set_yticks(range(len(labels)), labels, fontsize=8.5, parse_math=False)
    axis.set_title(drawn.title, fontsize=9, loc="left", parse_math=False)
    axis.set(xlim=(0, 1), ylim=(len(labels) - 0.4, -0.6))
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_bar(axis: Any, number: int, bar: Bar) -> None:
    axis.broken_barh([(0, 1)], (number - 0.4, 0.8), facecolors=ARRAY)
    for mark in bar.marks:
        opacity = 1.0 if mark.is_exact else INEXACT
        own = colour(mark.finding.kind.name)
        axis.broken_barh([(mark.begin, mark.end - mark.begin)], (number - 0.4, 0.8), facecolors=own, alpha=opacity)
    axis.vlines(bar.boundaries, number - 0.4, number + 0.4, colors=BOUNDARY, linewidth=0.6)


def _draw_legend(figure: Any, panels: list[Panel]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=own, label=kind) for kind, own in legend(panels)]
    if handles:
        figure.legend(handles=handles, loc="outside upper left", ncols=5, fontsize=8.5, frameon=False)


def _shortened(label: str) -> str:
    """Cut a long label at its start: the end is more specific."""
    return label if len(label) <= LONGEST_LABEL else f"…{label[1 - LONGEST_LABEL :]}"
