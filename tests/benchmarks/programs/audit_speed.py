"""Time an audit of a folder in this process and `cat` of the same files, in pairs. Prints JSON.

    audit_speed.py CHECKPOINT [--pairs 7]

"cat" and "audit" are seconds, in pairs; "cat_cpu" and "audit_cpu" are CPU seconds; "bytes" is the amount that both
read; "peak" is an upper bound of the memory in bytes: three times the peak of the largest of the command and its two
workers.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ckpt_patches.audit.audit import WHOLE, Report, audit
from program_arguments import parsed


def main() -> None:
    options = parsed({"checkpoint": Path}, pairs=7)
    files = [str(path) for path in sorted(options.checkpoint.rglob("*")) if path.is_file()]
    seconds: dict[str, list[float]] = {"cat": [], "cat_cpu": [], "audit": [], "audit_cpu": []}
    reports: list[Report] = []
    for _ in range(options.pairs + 1):
        measure("cat", lambda: read_all(files), seconds)
        measure("audit", lambda: reports.append(audit(options.checkpoint, workers=2)), seconds)
        assert reports[-1].verdict == WHOLE, reports[-1].findings
    pairs = {what: times[1:] for what, times in seconds.items()}  # the first pair is a warm-up
    print(
        json.dumps({**pairs, "bytes": reports[-1].checkpoint.nbytes, "peak": 3 * largest_process(options.checkpoint)})
    )


def measure(what: str, function: Callable[[], None], seconds: dict[str, list[float]]) -> None:
    started, cpu = time.perf_counter(), cpu_time()
    function()
    seconds[what].append(time.perf_counter() - started)
    seconds[f"{what}_cpu"].append(cpu_time() - cpu)


def cpu_time() -> float:
    """The CPU seconds of this process and its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def largest_process(checkpoint: Path) -> int:
    """The peak memory of the audit or a worker, in a new process: a child's peak includes its parent's."""
    code = (
        "import resource, sys; from pathlib import Path; from ckpt_patches.audit.audit import audit;"
        "audit(Path(sys.argv[1]), workers=2);"
        "print(max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(checkpoint)], check=True, capture_output=True, text=True)
    return 1024 * int(done.stdout)


def read_all(files: list[str]) -> None:
    with open("/dev/null", "w") as nowhere:
        subprocess.run(["cat", *files], stdout=nowhere, check=True)


if __name__ == "__main__":
    main()
