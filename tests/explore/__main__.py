"""Explore configurations that nobody listed.

    make explore MINUTES=60 [SEED=…] [PACKAGE=megatron] [VERSION=…] [FIXES=off] [WITHOUT=FIX]

Each case is drawn, run and judged: right, loud (somebody gets an error), or SILENT. A SILENT one is made smaller while
it shows the same, and printed as `SILENT <case> <signature>`; then the exit status is 1. The state of an exploration is
a file in `.explore/`: the same command goes on where it ended.

    make explore CASE=tests/explore/corpus/round_robin_links.json WITHOUT=round_robin_links
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from explore.judged import SILENT, Stack, outcome
from explore.search import Exploration
from explore.spaces import SPACES, complete
from upstream import newest

FOLDER = Path(__file__).resolve().parents[2] / ".explore"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="explore",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Each option can be given as a variable of its name, as make passes them on.",
    )

    def option(name: str, default: str, about: str, choices: tuple[str, ...] | None = None) -> None:
        value = os.environ.get(name.upper(), default)
        parser.add_argument(f"--{name}", default=value, help=about, choices=choices)

    option("minutes", "10", "how long new cases are begun")
    option("seed", time.strftime("%Y%m%d"), "of the cases: the same seed draws the same ones")
    option("package", "deepspeed", "what is explored", tuple(SPACES))
    option("version", "", "its release (default: the newest)")
    option("fixes", "on", "off: upstream as it is", ("on", "off"))
    option("without", "", "a fix to switch off")
    option("case", "", "run this file's case alone")
    args = parser.parse_args()
    case = complete(json.loads(Path(args.case).read_text())["case"]) if args.case else {"package": args.package}
    version = args.version or newest(SPACES[case["package"]].distribution)
    stack = Stack(case["package"], version, args.fixes == "on", args.without)
    if args.case:
        found = outcome(case, stack)
        print(f"{found}\n{found.detail}".strip())
        return int(found.kind == SILENT)
    FOLDER.mkdir(exist_ok=True)
    exploration = Exploration(FOLDER / f"{stack}-{args.seed}.json", args.seed, stack)
    exploration.run(time.monotonic() + 60 * float(args.minutes))
    print(exploration.summary())
    return int(exploration.counts[SILENT] > 0)


if __name__ == "__main__":
    sys.exit(main())
