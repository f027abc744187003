"""Draw healthy and damaged checkpoints of real packages, audit them, and print the share of verdicts per kind.

    python tests/tools/healthy_and_damaged.py --seed 0 --count 5 [--only 'deepspeed: zero 3*'] [--repair]

The kinds are in healthy_kinds.py and damage_kinds.py. A kind that cannot be written, for want of a package or because
upstream refuses it, is printed as skipped, with the reason. `--packages` names a folder with further packages
(`pip install --target`), `--keep` one in which the checkpoints stay; healthy ones are not written again. The exit
status is 1 if a healthy checkpoint is DAMAGED or INCOMPLETE, less than 97 % of them are WHOLE, or a damaged one is
WHOLE whose kind is not undetectable.

With `--repair`, each damaged one is also repaired: without options, with `--reset-moments`, and with `--from` the
checkpoint of an earlier step where there is one. `right`: REPAIRED, and all elements are those of the undamaged one,
but for the listed ones: main parameters are the weights, moments those of the earlier step, or both are zero.
`refused`: nothing was written. `called whole`: nothing was, as the audit found no damage. Anything else is `WRONG`.
"""

import argparse
import contextlib
import fnmatch
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [*map(str, (TESTS, TESTS / "programs", TESTS / "tools" / "programs", TESTS.parent))]

import numpy as np  # noqa: E402

import damage_kinds  # noqa: E402
from ckpt_patches.audit.audit import REPAIRED, Report, audit  # noqa: E402
from ckpt_patches.audit.repair_list import NAME  # noqa: E402
from ckpt_patches.cli import main as command  # noqa: E402
from ckpt_patches.formats.elements import read_elements, read_values  # noqa: E402
from healthy_kinds import Job, kinds  # noqa: E402

AT_ONCE = 50  # checkpoints that one run of a program writes: it has a limit of time
Table = dict[str, tuple[Counter[str], set[str]]]  # verdicts, and the names of the findings, by kind


def checkpoint_in(folder: Path) -> Path:
    """The checkpoint that a folder has: itself, or the one of a run."""
    inner = [path for name in ("global_step*", "iter_*", "checkpoint-*") for path in folder.glob(name) if path.is_dir()]
    return inner[0] if len(inner) == 1 and folder.name in ("judged", "earlier") else folder


def write(jobs: Sequence[Job]) -> dict[str, list[Path]]:
    """Write the checkpoints. Returns the folders of each kind; prints what is left out, and why."""
    every = kinds()
    for writer in dict.fromkeys(every[job.kind].write for job in jobs):
        missing = [job for job in jobs if not (job.folder / "judged").is_dir()]
        own = [(job, every[job.kind].options) for job in missing if every[job.kind].write is writer]
        if not own:
            continue
        for job, _ in own:
            job.folder.mkdir(parents=True, exist_ok=True)
        for first in range(0, len(own), AT_ONCE):
            _write(writer, own[first : first + AT_ONCE])
    made: dict[str, list[Path]] = {}
    for job in jobs:
        if (job.folder / "judged").is_dir():
            made.setdefault(job.kind, []).append(job.folder)
    return made


def _write(writer: Callable[[Sequence[tuple[Job, Any]]], list[str]], jobs: Sequence[tuple[Job, Any]]) -> None:
    try:
        for refused in writer(jobs):
            print(f"skipped: {refused}", flush=True)
    except Exception as error:
        names = ", ".join(sorted({job.kind for job, _ in jobs}))
        print(f"skipped: {names}: {type(error).__name__}: {str(error)[-1500:]}", flush=True)


def judge(folder: Path, kind: str, table: Table) -> None:
    found, why = table.setdefault(kind, (Counter(), set()))
    report: Report = audit(folder, workers=1)
    verdict = report.verdict
    if verdict == "WHOLE" and (inner := sorted(folder.glob("global_step*"))):  # of a Trainer with DeepSpeed
        report = audit(inner[0], workers=1)
        verdict = report.verdict
    found[verdict] += 1
    why |= {finding.kind.name for finding in report.findings if finding.kind.severity != "note"}


# Repairs

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


def repaired(folder: Path, healthy: Path, name: str, output: Path, table: dict[tuple[str, str], Counter[str]]) -> None:
    """Count the outcomes of the repairs of a damaged checkpoint."""
    older = checkpoint_in(healthy / "earlier") if (healthy / "earlier").is_dir() else None
    for source, options in ((None, ()), (None, ("--reset-moments",)), (older, ("--from",))):
        if source or options != ("--from",):
            how = () if source else options
            found = outcome(folder, checkpoint_in(healthy / "judged"), output / folder.name, source, *how)
            table.setdefault((name, "".join(options)), Counter())[found] += 1


# All of them


def damaged(out: Path, made: dict[str, list[Path]], only: str) -> Iterator[tuple[str, Path, Path]]:
    """Each damaged checkpoint: its kind, its folder, and that of the healthy ones that it was made from."""
    for damage in damage_kinds.DAMAGES:
        for base in (base for base in made if any(fnmatch.fnmatch(base, one) for one in damage.of)):
            name = f"{base}: {damage.what}"
            if not fnmatch.fnmatch(name, only):
                continue
            for number, healthy in enumerate(made[base]):
                own = checkpoint_in(healthy / "judged")
                folder = out / name.replace("/", "_") / str(number) / own.name
                shutil.rmtree(folder.parent, ignore_errors=True)
                shutil.copytree(own, folder)
                others = made[base][(number + 1) % len(made[base])]
                source = damage_kinds.Source(checkpoint_in(healthy / "earlier"), checkpoint_in(others / "judged"))
                if damage.change(folder, random.Random(f"{name} {healthy.name}"), source):
                    yield name, folder, healthy
                else:
                    shutil.rmtree(folder.parent)


def run(out: Path, count: int, seed: int, only: str, damage: str, *, keep: bool, repair: bool) -> int:
    wanted = [kind for kind in kinds() if fnmatch.fnmatch(kind, only)]
    numbers = range(seed, seed + count)
    made = write([Job(kind, n, out / "healthy" / kind / str(n)) for kind in wanted for n in numbers])
    bad = 0
    healthy: Table = {}
    for kind, folders in made.items():
        for folder in folders:
            judge(checkpoint_in(folder / "judged"), kind, healthy)
    total = _print("healthy", healthy)
    bad += total["DAMAGED"] + total["INCOMPLETE"] + (total["WHOLE"] < 0.97 * total.total())
    lost: Table = {}
    repairs: dict[tuple[str, str], Counter[str]] = {}
    for name, folder, source in damaged(out / "damaged", made, damage):
        judge(folder, name, lost)
        if repair:
            repaired(folder, source, name, out / "output", repairs)
        if not keep:
            shutil.rmtree(folder.parent)
    _print("damaged", lost)
    for (name, option), counts in repairs.items():
        print(f"repaired {name:50} {option:16} {_shares(counts)}", flush=True)
    total = sum(repairs.values(), Counter[str]())
    print(*([f"repaired all: {_shares(total)}"] if repairs else []))
    bad += sum(count for what, count in total.items() if what.startswith("WRONG"))
    bad += sum(found["WHOLE"] for name, (found, _) in lost.items() if not damage_kinds.is_undetectable(name))
    return 1 if bad else 0


def _print(what: str, table: Table) -> Counter[str]:
    """Print the share of verdicts per kind. Returns the sum."""
    total: Counter[str] = Counter()
    for name, (found, why) in table.items():
        total += found
        note = " (undetectable)" if what == "damaged" and damage_kinds.is_undetectable(name) else ""
        print(f"{what}  {name + note:62} {_shares(found)} {', '.join(sorted(why))}", flush=True)
    print(f"{what}  {'all':62} {_shares(total)}", flush=True)
    return total


def _shares(found: Counter[str]) -> str:
    return " ".join(f"{verdict} {found[verdict]}/{found.total()}" for verdict in sorted(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=5, help="checkpoints of each kind")
    parser.add_argument("--only", default="*", help="a pattern of healthy kinds")
    parser.add_argument("--damage", default="*", help="a pattern of damaged kinds; empty: none")
    parser.add_argument("--repair", action="store_true", help="repair each damaged one, and compare it")
    parser.add_argument("--packages", default="", help="a folder of further packages")
    parser.add_argument("--keep", type=Path, help="a folder for the checkpoints, which stay there")
    args = parser.parse_args()
    if args.packages:
        sys.path.append(args.packages)
        os.environ["FURTHER_PACKAGES"] = args.packages
    with tempfile.TemporaryDirectory() as temporary:
        out = args.keep or Path(temporary)
        return run(out, args.count, args.seed, args.only, args.damage, keep=args.keep is not None, repair=args.repair)


if __name__ == "__main__":
    sys.exit(main())
