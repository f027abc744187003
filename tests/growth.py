"""What saves, loads and conversions of upstream do at a size, counted without and with the fixes.

Used by tests/test_scale.py, which asserts that no count grows faster with the fixes, and by the benchmark that draws
docs/scale.svg.
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
# For each rank: a barrier; the bytes of a sum of failures twice, in place of barriers; some that Gloo's sockets write.
ALLOWED = {"messages": 1, "bytes": 16, "written": 1024}
SAME = 1.05  # which of two ranks comes first is chance, and so who makes a file

Counts = dict[str, list[dict[str, int]]]  # by part: of each rank, by measure
Sides = Mapping[str, Sequence[Mapping[str, int]]]  # of one part, by side


@dataclass(frozen=True)
class Size:
    """Of a run; a run leaves out what it has no use for."""

    ranks: int
    layers: int = 4
    hidden: int = 64  # elements: the square of it to a layer
    chunks: int = 64  # of zarr


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
    """The counts of one side; those of DeepSpeed include the conversion of the checkpoints that were saved."""
    out = folder / f"{side:8}"  # names are in what is written: those of both sides are equally long
    sizes = [text for name, number in vars(size).items() for text in (f"--{name}", str(number))]
    found = _run(run.release, side, run.command, out, *sizes, *run.arguments)
    if run is ZERO:
        found |= {f"stage {stage}, conversion": _converted(out, stage, side) for stage in "13"}
    return found


def _converted(folder: Path, stage: str, side: str) -> list[dict[str, int]]:
    """By upstream's converter or ours: with one worker, all is done in the process that counts."""
    module = {"upstream": "deepspeed.checkpoint.ds_to_universal", "ours": "deepspeed_patches.ds_to_universal"}[side]
    folders = ("--input_folder", folder / stage / "global_step1", "--output_folder", folder / f"universal{stage}")
    workers = ("--num_extract_workers", "1", "--num_merge_workers", "1")
    return _run(ZERO.release, side, "tool", folder, module, *folders, *workers)["tool"]


def _run(release: tuple[str, str], side: str, *arguments: str | Path) -> Counts:
    on: dict[str, Any] = {"tree": tree(*release), "delivery": DELIVERIES[side]}
    found: Counts = run_json("counting", *arguments, **on, env=PERMISSIVE if side == "upstream" else {})
    return found


def faster(small: Sides, large: Sides) -> list[str]:
    """Where ours grows faster than upstream's from a small run of one part to a large one, in words.

    That is more at the large size, by more than at the small one and what ALLOWED gives each rank, and more times as
    much. Compared are all ranks together, and the rank that does most.
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
