"""Count the operations of upstream's saves, loads and conversions at a size, without and with the fixes.

Used by tests/test_scale.py, which asserts that no count grows faster with the fixes, and by a benchmark.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upstream import newest, run_json, tree
from zero_checkpoints import PERMISSIVE

DELIVERIES = {"upstream": "none", "ours": "hook"}
MEASURES = ("messages", "bytes", "opened", "created", "metadata", "written")
# Extra per rank: a barrier; two 8-byte sums of failures in place of barriers; bytes that Gloo's sockets write.
ALLOWED = {"messages": 1, "bytes": 16, "written": 1024}
SAME = 1.05  # tolerance: which rank comes first, and so creates a file, is random

Counts = dict[str, list[dict[str, int]]]  # by part, rank and measure
Sides = Mapping[str, Sequence[Mapping[str, int]]]  # of one part, by side, rank and measure


@dataclass(frozen=True)
class Size:
    """The size of a run; a run ignores fields that it does not use."""

    ranks: int
    layers: int = 4
    hidden: int = 64  # a layer has hidden * hidden elements
    chunks: int = 64  # zarr chunks


@dataclass(frozen=True)
class Run:
    """One call of tests/programs/counting.py on a release."""

    command: str
    release: tuple[str, str]
    arguments: tuple[str, ...] = ()


ZARR = Run("zarr", ("megatron-core", "0.15.3"))
MEGATRON = Run(
    "megatron", ("megatron-core", newest("megatron-core")), ("--formats", "torch,dp_reshardable,fully_reshardable")
)
FLATTENED = Run(
    "megatron", ("megatron-core", "0.14.0"), ("--formats", "fully_sharded_bucket_space,fully_sharded_model_space")
)
ZERO = Run("zero", ("deepspeed", newest("deepspeed")), ("--stages", "1,3"))


def counted(run: Run, size: Size, side: str, folder: Path) -> Counts:
    """The counts of one side; for DeepSpeed they include the conversion of the saved checkpoints."""
    out = folder / f"{side:8}"  # files contain the path, so it has the same length on both sides
    sizes = [text for name, number in vars(size).items() for text in (f"--{name}", str(number))]
    found = _run(run.release, side, run.command, out, *sizes, *run.arguments)
    if run is ZERO:
        found |= {f"stage {stage}, conversion": _converted(out, stage, side) for stage in "13"}
    return found


def _converted(folder: Path, stage: str, side: str) -> list[dict[str, int]]:
    """The counts of upstream's or our converter; with one worker, all work is in the counting process."""
    module = {"upstream": "deepspeed.checkpoint.ds_to_universal", "ours": "deepspeed_patches.ds_to_universal"}[side]
    folders = ("--input_folder", folder / stage / "global_step1", "--output_folder", folder / f"universal{stage}")
    workers = ("--num_extract_workers", "1", "--num_merge_workers", "1")
    return _run(ZERO.release, side, "tool", folder, module, *folders, *workers)["tool"]


def _run(release: tuple[str, str], side: str, *arguments: str | Path) -> Counts:
    on: dict[str, Any] = {"tree": tree(*release), "delivery": DELIVERIES[side]}
    found: Counts = run_json("counting", *arguments, **on, env=PERMISSIVE if side == "upstream" else {})
    return found


def faster(small: Sides, large: Sides) -> list[str]:
    """Describe each count that grows faster with the fixes than without, from a small to a large run of one part.

    Such a count exceeds upstream's at the large size by more than at the small one (plus ALLOWED per rank), and by a
    larger factor. Compares the sum over all ranks, and the busiest rank.
    """
    found = []
    for name, (whose, together) in itertools.product(MEASURES, (("all ranks", sum), ("one rank", max))):
        (least, before), (upstream, after) = (
            [together(rank[name] for rank in run[side]) for side in ("upstream", "ours")] for run in (small, large)
        )
        ranks = len(large["ours"]) if together is sum else 1
        more = max(before - least, 0) + ALLOWED.get(name, 0) * ranks
        times = max(before / least, 1) if least else 1
        if after > max(upstream * SAME + more, upstream * times * SAME):
            found.append(f"{name} of {whose}: {after:,}, upstream {upstream:,}")
    return found
