"""A zarr save by byte ranges beside the synchronized save of the real package, and plain files. `make bench` prints."""

import statistics
from pathlib import Path
from typing import Any

from upstream import run_json, tree

FIX = "zarr_range_write"
NEWEST = "0.15.3"


def timed(folder: Path, *options: str, delivery: str = "hook") -> dict[str, Any]:
    """Median seconds, and the growth of a rank's memory over its own shard."""
    found = run_json(
        "zarr_timing",
        folder / "out",
        *options,
        tree=tree("megatron-core", NEWEST),
        delivery=delivery,
        fixes=[FIX],
        timeout=1200,
    )
    return {"seconds": statistics.median(found["seconds"]), "growth": found["growth"]}


def test_eight_ranks_four_arrays(tmp_path: Path) -> None:
    """4 arrays of 64 MB."""
    ours, plain = timed(tmp_path, "--repeat", "5"), timed(tmp_path, "--plain", "--repeat", "5")
    upstream = timed(tmp_path, "--repeat", "1", delivery="none")
    ratio, to_plain = upstream["seconds"] / ours["seconds"], ours["seconds"] / plain["seconds"]
    print(f"\nzarr save, 8 ranks, 4 arrays of 64 MB: {ratio:.0f} times faster than synchronized (figure to reach: 20)")
    print(f"  {ours['seconds']:.2f} s, {to_plain:.2f} times plain files (figure to reach: 2)")
    print(
        f"  a rank's memory grows by {ours['growth']:.2f} of its shard (figure: 1.1; upstream {upstream['growth']:.1f})"
    )


def test_the_same_state_on_more_ranks(tmp_path: Path) -> None:
    """4 arrays of 16 MB; the synchronized path grows with the number of ranks."""
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(3):
        for ranks in (2, 16):
            found = timed(tmp_path, "--ranks", str(ranks), "--megabytes", "64", "--repeat", "5")
            times.setdefault(("hook", ranks), []).append(found["seconds"])
    for ranks in (2, 16):
        options = ("--ranks", str(ranks), "--megabytes", "16", "--repeat", "1")
        times["none", ranks] = [timed(tmp_path, *options, delivery="none")["seconds"]]
    ours, upstream = (statistics.median(times[how, 16]) / statistics.median(times[how, 2]) for how in ("hook", "none"))
    print(f"\nzarr save, 16 ranks over 2: {ours:.2f} times (figure to reach: 1.3; synchronized {upstream:.1f})")


def test_a_thousand_interleaved_saves(tmp_path: Path) -> None:
    """8 ranks; byte ranges in small pieces, or a pause inside the read-modify-write."""
    for locks in ("working", "nothing"):
        for fixes, saves in (([FIX], "1000"), (["zarr_create_synchronizer"], "50")):
            arguments = (tmp_path / locks / fixes[0], "--saves", saves, "--locks", locks)
            release = tree("megatron-core", "0.14.0")
            found = run_json("zarr_interleavings", *arguments, tree=release, delivery="hook", fixes=fixes, timeout=3000)
            print(f"\n{fixes[0]}, locks {locks}: {found['lost']} of {found['slices']} slices lost in {saves} saves")
