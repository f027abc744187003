"""Compare migrating 2 GB with `cp -r`, migrate 4 GB in bounded memory, and plan 50,000 chunks; all figures are printed.

Times are medians of alternating runs with a warm page cache, with `sync` of the written files and without it. The
kernel counts the bytes that a process reads and writes.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from old_checkpoints import flattened, settings

RUNS = 5
GB = 1_000_000_000
LAYER = (2048, 4096)  # 117 MB with its states
TIMES, MEMORY, PLAN = 2.0, 500_000_000, 3.0  # targets: multiple of cp's time, bytes, seconds


def written(folder: Path, layers: int, shape: tuple[int, int] = LAYER, ranks: int = 2) -> Path:
    old, _ = flattened(folder, {f"layer{number}.weight": shape for number in range(layers)}, ranks=ranks)
    return old.write(settings())


def command(old: Path, new: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "ckpt_patches", "migrate", str(old), "--output", str(new), "--workers", "2", *options]


def run(*arguments: str | Path) -> None:
    subprocess.run(arguments, check=True, capture_output=True)


def on_disk(folder: Path) -> None:
    run("sync", *sorted(path for path in folder.rglob("*") if path.is_file()))


def seconds(work: Callable[[], None], new: Path) -> float:
    shutil.rmtree(new, ignore_errors=True)
    run("sync")
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("migrate") / "old", 17)


def test_no_slower_than_twice_a_copy(old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"

    def copied_to_disk() -> None:
        run("cp", "-r", old, new)
        on_disk(new)

    works: dict[str, Callable[[], None]] = {
        "cp -r, sync": copied_to_disk,
        "migrate": lambda: run(*command(old, new)),
        "cp -r": lambda: run("cp", "-r", old, new),
        "migrate --no-sync": lambda: run(*command(old, new, "--no-sync")),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(RUNS):
        for name, work in works.items():
            times[name].append(seconds(work, new))
    found = {name: statistics.median(own) for name, own in times.items()}
    nbytes = sum(path.stat().st_size for path in old.iterdir())
    print(f"\n{nbytes / GB:.2f} GB: " + ", ".join(f"{name} {own:.2f} s" for name, own in found.items()))
    for copy, own in (("cp -r, sync", "migrate"), ("cp -r", "migrate --no-sync")):
        print(f"{own}: {found[own] / found[copy]:.2f} times {copy} (to reach: at most {TIMES})")
    assert found["migrate"] <= TIMES * found["cp -r, sync"]
    assert found["migrate --no-sync"] <= TIMES * found["cp -r"]


def test_every_byte_is_read_and_written_once(old: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys; from ckpt_patches import cli; status = cli.main(sys.argv[1:]);"
        "print(open('/proc/self/io').read()); sys.exit(status)"
    )
    arguments = command(old, tmp_path / "new")[3:]
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    counted = dict(line.split(": ") for line in done.stdout.splitlines() if line.startswith(("rchar", "wchar")))
    nbytes = sum(path.stat().st_size for path in old.iterdir())
    read, written = (int(counted[name]) / nbytes for name in ("rchar", "wchar"))  # includes ended workers
    print(f"\nread {read:.3f} and written {written:.3f} times the checkpoint")
    assert 0.99 < read < 1.05
    assert 0.99 < written < 1.02


def test_memory_does_not_depend_on_the_size(tmp_path: Path) -> None:
    old = written(tmp_path / "old", 35)
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, capture_output=True);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command(old, tmp_path / "new", "--no-sync")],
        check=True,
        capture_output=True,
        text=True,
    )
    peak = 3 * 1024 * int(done.stdout)  # upper bound: the largest of the command and its two workers, three times
    nbytes = sum(path.stat().st_size for path in old.iterdir())
    print(f"\n{nbytes / GB:.2f} GB in at most {peak / 1e6:.0f} MB (to reach: less than {MEMORY / 1e6:.0f})")
    assert peak < MEMORY


def test_a_plan_of_50_000_chunks(tmp_path: Path) -> None:
    old = written(tmp_path / "old", 1021, (16, 16), 16)
    code = (
        "import sys, time; from pathlib import Path; from ckpt_patches.migrate.migrate import prepare;"
        "begin = time.perf_counter(); found, _ = prepare(Path(sys.argv[1]), None);"
        "print(sum(len(array.chunks) for array in found.arrays.values()), time.perf_counter() - begin)"
    )
    best = 1e9
    for _ in range(RUNS):
        done = subprocess.run([sys.executable, "-c", code, str(old)], check=True, capture_output=True, text=True)
        chunks, taken = done.stdout.split()
        best = min(best, float(taken))
    print(f"\n{chunks} chunks are read and planned in {best:.2f} s (to reach: {PLAN}), {os.cpu_count()} processors")
    assert int(chunks) >= 50_000
    assert best < PLAN
