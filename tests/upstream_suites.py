"""Run upstream's own tests without the fixes and with them, on CPU ranks, and write docs/upstream_suites.md of it.

    python tests/upstream_suites.py --megatron CHECKOUT --deepspeed CHECKOUT

A checkout is a folder with upstream's repository, tests included; it is copied and not changed. Each test file runs in
its own processes, on the copy without fixes, and then with all applicable fixes written into it. Its results are
recorded in tests/recorded/upstream_suites.json as soon as both runs end. So are those of the fixes' own tests for
upstream's suite, each at its path from `diff --with-test`, with only that fix.
"""

import argparse
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import generated
from ckpt_patches.engine.diffs import upstream_test
from ckpt_patches.engine.fix import package_of
from ckpt_patches.engine.registry import FIXES
from upstream import PROGRAMS, REPOSITORY, tree

RECORD = REPOSITORY / "tests" / "recorded" / "upstream_suites.json"
PAGE = REPOSITORY / "docs" / "upstream_suites.md"

SIDES = ("without", "with")
# A rank's outcomes of a test, the worst first; the worst over all ranks counts. A test that did not end has none.
OUTCOMES = ("error", "failed", "passed", "skipped")
AGAIN = 3  # more runs on each side of a test that passes only without the fixes
OWN = "own tests"  # the fixes' own tests, for --only
REASONS = 3  # recorded per file, the most common

Outcomes = dict[str, tuple[str, str]]  # by test: its outcome, and why it did not pass


@dataclass(frozen=True)
class Suite:
    """The tests of an upstream repository for code near the fixes' edits."""

    package: str
    folder: str  # in which pytest runs, in the checkout
    files: tuple[tuple[str, int], ...]  # and the number of ranks; 0 if the tests choose it


def _at(folder: str, names: str, ranks: int) -> tuple[tuple[str, int], ...]:
    return tuple((f"{folder}/test_{name}.py", ranks) for name in names.split())


MEGATRON = Suite(
    "megatron",
    ".",
    (
        *_at("tests/unit_tests/dist_checkpointing", "optimizer fully_parallel serialization", 8),
        *_at("tests/unit_tests", "optimizer_cpu_offloading optimizer_param_scheduler optimizer", 2),
        *_at(
            "tests/unit_tests/dist_checkpointing", "async_save mapping nonpersistent torch_dist layer_wise_optimizer", 8
        ),
        *_at("tests/unit_tests", "checkpointing layer_wise_optimizer", 2),
        *_at("tests/unit_tests/distributed", "param_and_grad_buffer distributed_data_parallel finalize_model_grads", 2),
    ),
)
DEEPSPEED = Suite(
    "deepspeed",
    "tests",
    (
        *_at(
            "unit/checkpoint",
            """latest_checkpoint lr_scheduler other_optimizer shared_weights tag_validation convert_checkpoint
            mics_optimizer moe_checkpoint pipeline reshape_checkpoint sparse universal_checkpoint zero_optimizer""",
            0,
        ),
        *_at("unit/runtime/zero", "zero_tensor_fragment zero_config zero_grad_clip", 0),
    ),
)
SUITES = {suite.package: suite for suite in (MEGATRON, DEEPSPEED)}


@dataclass(frozen=True)
class Limits:
    """Time limits of a test, and of a test file on one side."""

    test: int  # seconds
    file: int  # seconds
    compiler: int  # seconds, for DeepSpeed's extensions


@dataclass(frozen=True)
class Place:
    """A copy of a checkout in which the tests run, and a folder for their output."""

    suite: Suite
    tree: Path
    work: Path


# Run


def prepare(suite: Suite, checkout: Path, work: Path) -> Place:
    """Copy a checkout."""
    copy = work / suite.package
    if not copy.exists():
        shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git", "*.pyc"), symlinks=True)
    if suite is DEEPSPEED:
        as_installed(copy)
    return Place(suite, copy, work)


def as_installed(checkout: Path) -> None:
    """Write the version file that DeepSpeed's setup writes; without it, the version is 0.0.0, and loads fail."""
    version = (checkout / "version.txt").read_text().strip()
    lines = [
        f"version = {version!r}",
        "git_hash = git_branch = 'unknown'",
        "accelerator_name = 'cpu'",
        "torch_info = {'version': '0.0', 'bf16_support': False}",
        "torch_info |= dict.fromkeys(('cuda_version', 'nccl_version', 'hip_version'), '0.0')",
        "from .ops.op_builder.all_ops import ALL_OPS",
        "installed_ops = dict.fromkeys(ALL_OPS, False)",
    ]
    (checkout / "deepspeed" / "git_version_info_installed.py").write_text("\n".join([*lines, ""]))


def compile_extensions(place: Place, limits: Limits) -> None:
    """Compile DeepSpeed's extensions, for which a test's time limit is too short."""
    build = "from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder, ShareMemCommBuilder as comm\n"
    build += "for one in (FusedAdamBuilder, comm, CPUAdamBuilder): one().load(verbose=False)"
    environment = _environment(place, place.work / "outcomes", limits)
    _wait([sys.executable, "-c", build], place, environment, limits.compiler)


def fixes(place: Place, side: str, *names: str) -> list[str]:
    """Apply fixes to the copy, or revert them, all by default; return the newly applied ones."""
    chosen = names or [name for name in FIXES if package_of(name).split(".")[0] == place.suite.package]
    said = _command(place, "apply" if side == "with" else "revert", *chosen, "--tree", str(place.tree))
    return [line.partition(":")[0] for line in said.splitlines() if line.endswith(": applied")]


def _command(place: Place, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CKPT_PATCHES": "off"}
    command = [sys.executable, "-m", "ckpt_patches", *arguments]
    done = subprocess.run(command, env=environment, cwd=place.work, text=True, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr}")
    return done.stdout or done.stderr


def run(place: Place, tests: Sequence[str], ranks: int, limits: Limits) -> tuple[Outcomes, bool, float]:
    """The outcome of each test, whether the run ended, and its seconds."""
    with tempfile.TemporaryDirectory(dir=place.work) as folder:
        outcomes = Path(folder, "outcomes")
        command = [sys.executable]
        options = ["-p", "upstream_outcomes", "-p", "no:cacheprovider", "-q", "--tb=short", *tests]
        if place.suite is MEGATRON:
            outcomes.with_name("outcomes.folders").mkdir()
            command += [str(PROGRAMS / "upstream_outcomes.py"), str(ranks), *options]
        else:
            command += ["-m", "pytest", *options, "--basetemp", str(Path(folder, "tests"))]
        began = time.monotonic()
        ended = _wait(command, place, _environment(place, outcomes, limits), limits.file)
        names = [f"{outcomes}.{rank}" for rank in range(ranks)] or [str(outcomes)]
        return joined([_read(Path(name)) for name in names]), ended, time.monotonic() - began


def _environment(place: Place, outcomes: Path, limits: Limits) -> dict[str, str]:
    inherited = filter(None, [os.environ.get("PYTHONPATH")])  # such as an older pytest, which some of these tests need
    common = {
        **os.environ,
        "CKPT_PATCHES": "off",  # fixes are only in the files
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "UPSTREAM_OUTCOMES": str(outcomes),
        "UPSTREAM_SECONDS": str(limits.test),
        "PYTHONPATH": os.pathsep.join([str(place.tree), str(PROGRAMS), *inherited]),
    }
    if place.suite is DEEPSPEED:
        return {
            **common,
            "DS_ACCELERATOR": "cpu",
            "LOCAL_SIZE": "4",  # ranks that the machine has room for
            "UPSTREAM_PRELOAD": "torch,deepspeed",
            "TORCH_EXTENSIONS_DIR": str(place.work / "extensions"),
        }
    return {
        **common,
        "PYTHONPATH": os.pathsep.join([common["PYTHONPATH"], str(tree("triton", "3.9.0"))]),
        "UPSTREAM_STAND_IN": "1",
        "FAKEGPU_PG_TIMEOUT": "20",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait(command: Sequence[str], place: Place, environment: Mapping[str, str], seconds: int) -> bool:
    """Run a command; return whether it ended in time. Kill what is left of it."""
    log = place.work / "last.log"
    with log.open("w") as file:
        started = subprocess.Popen(
            command,
            cwd=place.tree / place.suite.folder,
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            started.wait(seconds)
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def _read(path: Path) -> Outcomes:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["test"]: (line["outcome"], line["reason"]) for line in lines}


def joined(of_ranks: Sequence[Outcomes]) -> Outcomes:
    """The worst outcome over the ranks of each test that ended on all ranks."""
    tests = set.intersection(*map(set, of_ranks)) if of_ranks else set()
    return {
        test: min((rank[test] for rank in of_ranks), key=lambda found: OUTCOMES.index(found[0]))
        for test in sorted(tests)
    }


# Compare


def compare(place: Place, file: str, ranks: int, limits: Limits) -> dict[str, Any]:
    """The record's row of a test file."""
    found, ended, seconds = {}, {}, {}
    for side in SIDES:
        fixes(place, side)
        found[side], ended[side], seconds[side] = run(place, [file], ranks, limits)
    lost = sorted(passed(found["without"]) - passed(found["with"]))  # or did not end with the fixes
    return {
        "file": file,
        "ranks": ranks,
        **{side: counts(found[side]) for side in SIDES},
        "ended": ended,
        "seconds": {side: round(taken) for side, taken in seconds.items()},
        "differ": differences(found),
        "again": again(place, file, lost, ranks, limits) if lost else {},
        "reasons": reasons(found["without"]),
    }


def passed(found: Outcomes) -> set[str]:
    return {test for test, (outcome, _) in found.items() if outcome == "passed"}


def counts(found: Outcomes) -> dict[str, int]:
    number = Counter(outcome for outcome, _ in found.values())
    return {outcome: number[outcome] for outcome in OUTCOMES}


def differences(found: Mapping[str, Outcomes]) -> dict[str, dict[str, list[str]]]:
    """The tests with different outcomes on the two sides, among those that both have run."""
    without, fixed = (found[side] for side in SIDES)
    both = [test for test in without if test in fixed and without[test][0] != fixed[test][0]]
    return {test: {side: list(found[side][test]) for side in SIDES} for test in both}


def again(place: Place, file: str, tests: Sequence[str], ranks: int, limits: Limits) -> dict[str, dict[str, list[str]]]:
    """The outcomes of these tests in more runs on each side."""
    told: dict[str, dict[str, list[str]]] = {test: {side: [] for side in SIDES} for test in tests}
    for side in SIDES:
        fixes(place, side)
        for _ in range(AGAIN):
            found, _, _ = run(place, tests, ranks, limits)
            for test in tests:
                told[test][side].append(found.get(test, ("not ended", ""))[0])
    return told


def reasons(found: Outcomes) -> list[list[Any]]:
    """The most common reasons why tests do not pass, with counts; addresses and paths are shortened."""
    texts = (_plain(why) for outcome, why in found.values() if outcome != "passed")
    return [[why, number] for why, number in Counter(texts).most_common(REASONS)]


def _plain(why: str) -> str:
    return re.sub(r"/\S+/", "…/", re.sub(r"0x[0-9a-f]+", "0x…", why))


def own_test(place: Place, fix: str, limits: Limits) -> dict[str, Any]:
    """The results of a fix's own test, without any fix and with only this one."""
    path, text = upstream_test(fix)
    (place.tree / path).parent.mkdir(parents=True, exist_ok=True)
    (place.tree / path).write_bytes(text)
    fixes(place, "without")
    found = {}
    ranks = 1 if place.suite is MEGATRON else 0
    for side in SIDES:
        if side == "with":
            fixes(place, side, fix)
        found[side], _, _ = run(place, [os.path.relpath(path, place.suite.folder)], ranks, limits)
    (place.tree / path).unlink()
    return {"fix": fix, "file": path, **{side: counts(found[side]) for side in SIDES}}


# Record


def run_suite(suite: Suite, checkout: Path, work: Path, limits: Limits, only: str) -> None:
    """Run all files of a suite and record their rows."""
    place = prepare(suite, checkout, work)
    if suite is DEEPSPEED:
        compile_extensions(place, limits)
    fixes(place, "without")
    applied = fixes(place, "with")
    record(suite.package, {**about(checkout), "fixes": applied})
    if re.search(only, OWN):
        record(suite.package, {"own": [own_test(place, fix, limits) for fix in applied]})
    for file, ranks in suite.files:
        if re.search(only, file) and (place.tree / suite.folder / file).exists():
            row = compare(place, file, ranks, limits)
            print(f"{file}, {ranks or 'own'} ranks: {'; '.join(told(row, side) for side in SIDES)}", flush=True)
            record(suite.package, row=row)


def about(checkout: Path) -> dict[str, Any]:
    """The commit and the environment of the results."""
    commit, date = _git(checkout, "log", "-1", "--format=%H %cs").split()
    return {
        "tag": _git(checkout, "describe", "--tags", "--always"),
        "commit": commit,
        "commit_date": date,
        "run": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


def _git(checkout: Path, *arguments: str) -> str:
    command = ["git", "-C", str(checkout), *arguments]
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout.strip()


def record(package: str, changes: Mapping[str, Any] | None = None, row: Mapping[str, Any] | None = None) -> None:
    """Add facts about a suite, or one file's row, to the record."""
    whole = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    mine = whole.setdefault(package, {"files": []})
    mine.update(changes or {})
    if row:
        same = (row["file"], row["ranks"])
        mine["files"] = [one for one in mine["files"] if (one["file"], one["ranks"]) != same] + [dict(row)]
    RECORD.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# The page


def told(row: Mapping[str, Any], side: str) -> str:
    """The counts of one side, as text."""
    numbers = (f"{row[side][outcome]} {outcome}" for outcome in reversed(OUTCOMES) if row[side][outcome])
    return ", ".join(numbers) or "none ended"


def blocks(whole: Mapping[str, Any]) -> dict[str, str]:
    """The block of each package, from the record."""
    return {package: "\n\n".join(filter(None, section(package, suite))) for package, suite in whole.items()}


def section(package: str, suite: Mapping[str, Any]) -> Iterator[str]:
    applied = ", ".join(f"`{fix}`" for fix in suite["fixes"])
    yield (
        f"{suite['tag']} (commit {suite['commit'][:10]}, {suite['commit_date']}), run on {suite['run']} with Python "
        f"{suite['python']} and torch {suite['torch']}, with {applied}."
    )
    rows = suite["files"]
    same = [f"{_file(row)}: {told(row, SIDES[0])}" for row in rows if row[SIDES[0]] == row[SIDES[1]]]
    yield f"The same without the fixes and with them: {'; '.join(same)}."
    if others := [(_file(row), *map(partial(told, row), SIDES)) for row in rows if row[SIDES[0]] != row[SIDES[1]]]:
        yield generated.table(["Other files", "Without the fixes", "With them"], others)
    if missing := [f"`{file}`" for file, ranks in SUITES[package].files if not _has(rows, file, ranks)]:
        yield f"Not run: {', '.join(missing)}."
    if own := [f"`{row['fix']}`" for row in suite.get("own", []) if fails_without(row)]:
        yield f"Own tests that fail without their fix and pass with it alone: {', '.join(own)}."
    lost = [
        f"`{test}`: {AGAIN} more runs without ({', '.join(runs['without'])}) and with them ({', '.join(runs['with'])})"
        for row in rows
        for test, runs in row["again"].items()
    ]
    yield f"Tests that passed without the fixes and not with them: {'; '.join(lost) or 'none'}."
    changed = [f"`{test}`" for row in rows for test in row["differ"] if test not in row["again"]]
    if changed:
        yield f"Other tests with another outcome: {', '.join(changed)}."


def _file(row: Mapping[str, Any]) -> str:
    """The file, marked if a run of it did not end."""
    return f"`{row['file']}`{'' if all(row['ended'].values()) else ' *'}"


def _has(rows: Sequence[Mapping[str, Any]], file: str, ranks: int) -> bool:
    return any((row["file"], row["ranks"]) == (file, ranks) for row in rows)


def fails_without(row: Mapping[str, Any]) -> bool:
    """Whether a fix's own test fails without the fix, and passes with only this fix."""
    failed, fixed = row["without"]["failed"], row["with"]
    return bool(failed > 0 and fixed["failed"] == fixed["error"] == 0 and fixed["passed"] >= failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megatron", type=Path, metavar="CHECKOUT", help="of Megatron-LM, with its tests")
    parser.add_argument("--deepspeed", type=Path, metavar="CHECKOUT", help="of DeepSpeed, with its tests")
    parser.add_argument("--only", default="", metavar="PATTERN", help=f"files in whose names this is found; '{OWN}'")
    parser.add_argument("--seconds", type=int, default=600, help="that a file may take on one side (default 600)")
    parser.add_argument("--compiler", type=int, default=900, metavar="SECONDS", help="for extensions (default 900)")
    parser.add_argument("--work", type=Path, help="a folder for copies and extensions, which is kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        work.mkdir(exist_ok=True)
        for suite, checkout in ((MEGATRON, options.megatron), (DEEPSPEED, options.deepspeed)):
            if checkout:
                run_suite(suite, checkout.resolve(), work, Limits(60, options.seconds, options.compiler), options.only)
    if RECORD.exists():
        generated.write(PAGE, blocks(json.loads(RECORD.read_text(encoding="utf-8"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
