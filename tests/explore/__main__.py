"""Explore configurations that nobody listed.

    make explore MINUTES=60 [SEED=…] [PACKAGE=megatron] [VERSION=…] [FIXES=off] [WITHOUT=FIX]

Each case is drawn, run and judged: right, loud (somebody gets an error), or SILENT. A SILENT one is made smaller while
it shows the same, and printed as `SILENT <case> <signature>`; then the exit status is 1. The state of an exploration is
a file in `.explore/`: the same command goes on where it ended. With FIXES=off the fixes of silent bugs are off, each
until the exploration has found its bug.

    make explore CASE=tests/explore/corpus/round_robin_links.json WITHOUT=round_robin_links
"""

import json
import os
import sys
import time
from pathlib import Path

import forks
from explore.judged import SILENT, Stack, outcome
from explore.search import Exploration
from explore.spaces import SPACES, complete
from upstream import newest

FOLDER = Path(__file__).resolve().parents[2] / ".explore"


def main() -> int:
    given = os.environ.get
    case = complete(json.loads(Path(given("CASE", "")).read_text())["case"]) if given("CASE") else {}
    package = case.get("package", given("PACKAGE", "deepspeed"))
    if package not in SPACES or given("FIXES", "on") not in ("on", "off"):
        print(f"expected PACKAGE to be of {', '.join(SPACES)} and FIXES on or off; {__doc__}", file=sys.stderr)
        return 2
    version = given("VERSION") or newest(SPACES[package].DISTRIBUTION)
    stack = Stack(package, version, given("FIXES", "on") == "on", given("WITHOUT", ""))
    if case:
        found = outcome(case, stack)
        print(f"{found}\n{found.detail}".strip())
        return int(found.kind == SILENT)
    FOLDER.mkdir(exist_ok=True)
    seed = given("SEED") or time.strftime("%Y%m%d")  # the same seed draws the same cases
    forks.AT_ONCE = 24  # cases draw releases, deliveries and fingerprints: imports would be half of the work
    exploration = Exploration(FOLDER / f"{stack}-{seed}.json", seed, stack)
    exploration.run(time.monotonic() + 60 * float(given("MINUTES", "10")))
    print(exploration.summary())
    return int(exploration.counts[SILENT] > 0)


if __name__ == "__main__":
    sys.exit(main())
