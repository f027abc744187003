"""Audit a folder by one process with two workers, and by two processes with one each, in pairs. Prints JSON.

    audit_group_speed.py CHECKPOINT [--pairs 7]

"one" and "two" are the commands' seconds, from their start to their end, in pairs; "one_cpu" and "two_cpu" those of the
processors.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"one": [], "one_cpu": [], "two": [], "two_cpu": []}
    for _ in range(options.pairs + 1):
        for name, size in (("one", 1), ("two", 2)):
            begin, cpu = time.perf_counter(), cpu_time()
            audit(options.checkpoint, size)
            seconds[name].append(time.perf_counter() - begin)
            seconds[f"{name}_cpu"].append(cpu_time() - cpu)
    print(json.dumps({what: times[1:] for what, times in seconds.items()}))  # the first was to warm up


def audit(checkpoint: Path, size: int) -> None:
    """By so many processes, with two workers in all."""
    command = [sys.executable, "-m", "ckpt_patches", "audit", str(checkpoint), "--workers", str(2 // size)]
    places = [f"{rank}/{size}" for rank in range(size)] if size > 1 else ["none"]
    running = [
        subprocess.Popen([*command, "--group", place], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for place in places
    ]
    said = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0] * size, said
    assert b"WHOLE" in said[0]


def cpu_time() -> float:
    """Of the processes that this one has waited for."""
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    main()
