"""Compare a zarr save by byte ranges with the package's synchronized save and with plain files (`make bench`)."""

import statistics
from pathlib import Path
from typing import Any

from upstream import run_json, tree

FIX = "zarr_range_write"
NEWEST = "0.15.3"


def timed(folder: Path, *options: str, delivery: str = "hook") -> dict[str, Any]:
    """The seconds of every repetition, and a rank's memory growth relative to its shard."""
    found: dict[str, Any] = run_json(
        "zarr_timing",
        folder / "out",
        *options,
        tree=tree("megatron-core", NEWEST),
        delivery=delivery,
        fixes=[FIX],
        timeout=1200,
    )
    return found


def test_eight_ranks_four_arrays(tmp_path: Path) -> None:
    """Print the time of a save of 4 arrays of 64 MB."""
    ours, upstream = timed(tmp_path, "--repeat", "9"), timed(tmp_path, "--repeat", "1", delivery="none")
    seconds = statistics.median(ours["save"])
    to_plain = statistics.median(a / b for a, b in zip(ours["save"], ours["plain"], strict=True))
    print(
        f"\nzarr save, 8 ranks, 4 arrays of 64 MB: {upstream['save'][0] / seconds:.0f} times faster than synchronized"
    )
    print(f"  (figure to reach: 20); {seconds:.2f} s, {to_plain:.2f} times plain files (figure to reach: 2)")
    print(
        f"  a rank's memory grows by {ours['growth']:.2f} of its shard (figure: 1.1; upstream {upstream['growth']:.1f})"
    )
