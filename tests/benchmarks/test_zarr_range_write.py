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


def test_the_same_state_on_more_ranks(tmp_path: Path) -> None:
    """Print ratios for 4 arrays of 256 MB, upstream's 16 MB. With less, 16 processes start slower than they write."""
    ratios = []
    for _ in range(3):
        few, many = (
            statistics.median(timed(tmp_path, "--ranks", ranks, "--megabytes", "256")["save"]) for ranks in ("2", "16")
        )
        ratios.append(many / few)
    options = ("--megabytes", "16", "--repeat", "1")
    few, many = (timed(tmp_path, "--ranks", n, *options, delivery="none")["save"][0] for n in ("2", "16"))
    ours, upstream = statistics.median(ratios), many / few
    print(f"\nzarr save, 16 ranks over 2: {ours:.2f} times (figure to reach: 1.3; synchronized {upstream:.1f})")


def test_a_thousand_interleaved_saves(tmp_path: Path) -> None:
    """Print the slices lost by 8 ranks: byte ranges in small pieces, or a pause in the read-modify-write."""
    for locks in ("working", "nothing"):
        for fixes, saves in (([FIX], "1000"), (["zarr_create_synchronizer"], "50")):
            arguments = (tmp_path / locks / fixes[0], "--saves", saves, "--locks", locks)
            release = tree("megatron-core", "0.14.0")
            found = run_json("zarr_interleavings", *arguments, tree=release, delivery="hook", fixes=fixes, timeout=3000)
            print(f"\n{fixes[0]}, locks {locks}: {found['lost']} of {found['slices']} slices lost in {saves} saves")
