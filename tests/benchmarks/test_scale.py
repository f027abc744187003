"""Draw docs/scale.svg: the operations of 2 to 8 ranks, counted with and without the fixes (`make bench`)."""

from pathlib import Path

import generated
import growth
from growth import Counts, Size
from upstream import REPOSITORY

PICTURE = REPOSITORY / "docs" / "scale.svg"
RANKS = (2, 4, 8)
COLORS = {"upstream": "#b04030", "ours": "#2060a0"}
RUNS = {"megatron": growth.MEGATRON, "zero": growth.ZERO, "zarr": growth.ZARR}
# The run, its part, the measure, and the panel's title.
PANELS = (
    ("megatron", "torch, save", "messages", "messages, save in the format torch"),
    ("megatron", "torch, save", "bytes", "bytes sent, save in the format torch"),
    ("megatron", "fully_reshardable, save", "messages", "messages, save in fully_reshardable"),
    ("zero", "stage 1, save", "messages", "messages, save of ZeRO stage 1"),
    ("zero", "stage 3, conversion", "opened", "files opened, universal conversion of stage 3"),
    ("zarr", "save", "metadata", "other metadata operations, save by zarr"),
)
Sweeps = dict[tuple[str, str, int], Counts]  # by run, side and number of ranks


def test_what_grows_with_the_number_of_ranks(tmp_path: Path) -> None:
    found: Sweeps = {
        (name, side, ranks): growth.counted(run, Size(ranks), side, tmp_path / f"{name}{ranks}")
        for name, run in RUNS.items()
        for side in growth.DELIVERIES
        for ranks in RANKS
    }
    for name, part, measure, title in PANELS:
        print(f"\n{title}: {', '.join(f'{side} {values(found, name, side, part, measure)}' for side in COLORS)}")
    draw(found)


def values(found: Sweeps, name: str, side: str, part: str, measure: str) -> list[int]:
    """The sum over all ranks, for each number of ranks."""
    return [sum(rank[measure] for rank in found[name, side, ranks][part]) for ranks in RANKS]


def draw(found: Sweeps) -> None:
    """Draw the panels. Proportional growth is a straight line through the origin."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "scale", "svg.fonttype": "none"}  # same figures, same picture
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6.5), layout="constrained")
    for axis, (name, part, measure, title) in zip(axes.flat, PANELS, strict=True):
        for side, color in COLORS.items():
            axis.plot(RANKS, values(found, name, side, part, measure), label=side, color=color, marker="o")
        axis.set(title=title, xlabel="ranks", xlim=(0, None), ylim=(0, None), xticks=RANKS)
        axis.grid(alpha=0.3)
    axes.flat[0].legend()
    figure.savefig(PICTURE, metadata={"Date": None})
    PICTURE.write_text(generated.themed(PICTURE.read_text(encoding="utf-8")), encoding="utf-8")
    pyplot.close(figure)
