"""Draw healthy and damaged checkpoints of real packages, audit them, and print the share of verdicts per kind.

    python tests/tools/healthy_and_damaged.py --seed 0 --count 5 [--only 'deepspeed: zero 3*'] [--packages FOLDER]

The kinds are in healthy_kinds.py and damage_kinds.py. A kind that cannot be written, for want of a package or because
upstream refuses it, is printed as skipped, with the reason. `--packages` names a folder with further packages
(`pip install --target`), `--keep` one in which the checkpoints stay; healthy ones are not written again. The exit
status is 1 if a healthy checkpoint is DAMAGED or INCOMPLETE, less than 97 % of them are WHOLE, or a damaged one is
WHOLE whose kind is not undetectable.
"""

import argparse
import fnmatch
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [*map(str, (TESTS, TESTS / "programs", TESTS / "tools" / "programs", TESTS.parent))]

import damage_kinds  # noqa: E402
from ckpt_patches.audit.audit import Report, audit  # noqa: E402
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


def damaged(out: Path, made: dict[str, list[Path]], only: str) -> Iterator[tuple[str, Path]]:
    """Each damaged checkpoint, with its kind."""
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
                    yield name, folder
                else:
                    shutil.rmtree(folder.parent)


def run(out: Path, count: int, seed: int, only: str, damage: str, *, keep: bool) -> int:
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
    for name, folder in damaged(out / "damaged", made, damage):
        judge(folder, name, lost)
        if not keep:
            shutil.rmtree(folder.parent)
    _print("damaged", lost)
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
    parser.add_argument("--packages", default="", help="a folder of further packages")
    parser.add_argument("--keep", type=Path, help="a folder for the checkpoints, which stay there")
    args = parser.parse_args()
    if args.packages:
        sys.path.append(args.packages)
        os.environ["FURTHER_PACKAGES"] = args.packages
    with tempfile.TemporaryDirectory() as temporary:
        out = args.keep or Path(temporary)
        return run(out, args.count, args.seed, args.only, args.damage, keep=args.keep is not None)


if __name__ == "__main__":
    sys.exit(main())
