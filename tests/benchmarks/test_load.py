"""Compare the time of loads with all fixes and without, and the spread of upstream's own loads."""

import json
import statistics
from pathlib import Path

import pytest

from upstream import newest, run, tree

PAIRS, LOADS = 8, 30


@pytest.mark.parametrize("case", ["stage1", "stage2", "stage3", "universal-stage1", "universal-stage3"])
def test_loads_of_200_megabytes(case: str, tmp_path: Path) -> None:
    """Print ratios of the fastest loads of three processes, in rotating order: two without the fixes, one with them."""
    root = tree("deepspeed", newest("deepspeed"))
    run("timed_loads", "save", tmp_path, case, tree=root, delivery="hook")

    def fastest(delivery: str) -> float:
        done = run("timed_loads", "load", tmp_path, case, str(LOADS), tree=root, delivery=delivery)
        return float(min(json.loads(done.stdout.splitlines()[-1])))

    order = ["none", "hook", "again"]
    found: dict[str, list[float]] = {name: [] for name in order}
    for pair in range(PAIRS):
        for name in order[pair % 3 :] + order[: pair % 3]:
            found[name].append(fastest("none" if name == "again" else name))
    base = found["none"]
    ratios = {
        name: statistics.median(one / of for one, of in zip(found[name], base, strict=True))
        for name in ("hook", "again")
    }
    spread = [one / of for one, of in zip(found["again"], base, strict=True)]
    print(
        f"\n{case}: {statistics.median(base):.3f} s; with the fixes {ratios['hook'] - 1:+.1%} (figure to reach: 5 %), "
        f"without again {ratios['again'] - 1:+.1%}, pairs from {min(spread) - 1:+.1%} to {max(spread) - 1:+.1%}"
    )
