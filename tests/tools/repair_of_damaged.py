"""Repair every kind of damaged checkpoint, compare each copy with the undamaged one, and print the outcomes per kind.

    python tests/tools/repair_of_damaged.py --seed 0 --count 2 [--only 'ranks: fsdp2*'] [--damage '*: no moments']

Each one is repaired without options, with `--reset-moments`, and with `--from` the checkpoint of an earlier step where
there is one. `right`: REPAIRED, and all elements are those of the undamaged one, but for the listed ones: main
parameters are the weights, moments those of the earlier step, or both are zero. `refused`: nothing was written.
`called whole`: nothing was, as the audit found no damage. Anything else is `WRONG`, and the exit status 1.
"""

import argparse
import contextlib
import fnmatch
import io
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [*map(str, (TESTS, TESTS / "programs", TESTS / "tools" / "programs", TESTS.parent))]

import numpy as np  # noqa: E402

from ckpt_patches.audit.audit import REPAIRED, audit  # noqa: E402
from ckpt_patches.audit.repair_list import NAME  # noqa: E402
from ckpt_patches.cli import main as command  # noqa: E402
from ckpt_patches.formats.elements import read_elements, read_values  # noqa: E402
from healthy_and_damaged import checkpoint_in, damaged, write  # noqa: E402
from healthy_kinds import Job, kinds  # noqa: E402

Values = dict[tuple[str, str], Any]


def values(folder: Path) -> tuple[Values, Values]:
    """The elements of all arrays, by array and shard, as bytes; and the weights of main parameters, as numbers."""
    elements, weights = Values(), Values()
    for shard in audit(folder, 1).checkpoint.shards:
        for role, stream in shard.streams.items():
            data = read_elements(stream, 0, shard.numel).view(np.uint8).copy()
            elements[stream.array, shard.label] = data.reshape(shard.numel, -1)
            if role == "master" and "weight" in shard.streams:
                weights[stream.array, shard.label] = read_values(shard.streams["weight"], 0, shard.numel)
    return elements, weights


def difference(output: Path, before: Path, older: Path | None) -> str:
    """The first array with another element than the listed ones explain; empty if there is none."""
    found, weights = values(output)
    expected, _ = values(before)
    source = values(older)[0] if older else {}
    for entry in json.loads((output / NAME).read_text())["repaired"]:
        own = entry["array"], entry["shard"]
        both = [key for key in expected if key[1] == own[1] and square(key[0]) == square(own[0])]
        for key in [own] if own in weights or older else both:
            for begin, end in entry["ranges"]:
                if key in weights:
                    expected[key][begin:end] = weights[key][begin:end].view(np.uint8).reshape(end - begin, -1)
                elif "exp_avg" in key[0]:
                    expected[key][begin:end] = source[key][begin:end] if older else 0
    return next((str(key) for key in expected if not np.array_equal(found[key], expected[key])), "")


def square(array: str) -> str:
    """The second moment of a moment's parameter, which stands anywhere in the name."""
    return re.sub(r"exp_avg(_sq)?\b", "exp_avg_sq", array)


def outcome(folder: Path, truth: Path, output: Path, older: Path | None, *options: str) -> str:
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(exist_ok=True)  # without it, every repair is refused
    if older:
        options = ("--from", str(older))
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = command(["repair", str(folder), "--output", str(output), *options])
    if status == 2:
        return (
            "refused" if "Traceback" not in said.getvalue() and not output.exists() else "WRONG: refused, not cleanly"
        )
    if status == 0 and not output.exists() and ": nothing to repair" in said.getvalue():
        return "called whole"  # of a kind that the audit cannot detect
    wrong = difference(output, truth, older)
    if wrong or status or audit(output, 1).verdict != REPAIRED:
        return f"WRONG: exit {status}, {wrong}"
    return "right"


def run(count: int, seed: int, only: str, damage: str) -> int:
    table: dict[tuple[str, str], Counter[str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        wanted = [kind for kind in kinds() if fnmatch.fnmatch(kind, only)]
        made = write(
            [Job(kind, n, out / "healthy" / kind / str(n)) for kind in wanted for n in range(seed, seed + count)]
        )
        for name, folder in damaged(out / "damaged", made, damage):
            base = max((kind for kind in made if name.startswith(f"{kind}: ")), key=len)
            healthy = made[base][int(folder.parent.name)]
            truth = checkpoint_in(healthy / "judged")
            older = checkpoint_in(healthy / "earlier") if (healthy / "earlier").is_dir() else None
            how = {"": (None, ()), "--reset-moments": (None, ("--reset-moments",)), "--from": (older, ())}
            for option, (source, options) in how.items():
                if option != "--from" or source:
                    found = outcome(folder, truth, out / "output" / folder.name, source, *options)
                    table.setdefault((name, option), Counter())[found] += 1
            shutil.rmtree(folder.parent)
        for (name, option), own in table.items():
            print(f"{name:50} {option:16} {', '.join(f'{what} {n}' for what, n in sorted(own.items()))}", flush=True)
    total = sum(table.values(), Counter[str]())
    print(f"{'all':67} {', '.join(f'{what} {n}' for what, n in sorted(total.items()))}")
    return 1 if any(what.startswith("WRONG") for what in total) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--only", default="*: AdamW", help="a pattern of healthy kinds")
    parser.add_argument("--damage", default="*", help="a pattern of damaged kinds")
    args = parser.parse_args()
    sys.exit(run(args.count, args.seed, args.only, args.damage))
