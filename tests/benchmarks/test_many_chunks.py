"""The audit's cost for an index of two million chunks, before any element is read, with and without `repetitions`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from upstream import REPOSITORY

COUNTS = (200_000, 2_000_000)  # chunks of one tensor, whose files are absent
TIME, MEMORY = 10.0, 1e9  # targets for two million chunks on an idle CPU: seconds and bytes
WAYS = {
    "by repetitions": "",
    "without": "torch_dist.LARGE = 1 << 60",
}
AUDIT = """
import json, resource, sys, time
from pathlib import Path
from ckpt_patches.audit import audit
from ckpt_patches.formats import torch_dist
{change}
path, begin = Path(sys.argv[1]), time.perf_counter()
found = audit.audit(path).checkpoint
seconds, memory = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
cpu = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps([seconds, cpu, memory, sorted(finding.detail for finding in found.findings)]))
"""


class Cost(NamedTuple):
    """The cost of an audit in a new process."""

    seconds: float
    cpu: float  # seconds, with imports
    memory: float  # peak, in bytes
    findings: list[str]


def cost(folder: Path, change: str) -> Cost:
    command = [sys.executable, "-c", AUDIT.format(change=change), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Cost(*json.loads(done.stdout))


@pytest.mark.parametrize("count", COUNTS)
def test_an_index_of_chunks(count: int, tmp_path: Path) -> None:
    writer = REPOSITORY / "tests/programs/write_index_of_chunks.py"
    subprocess.run([sys.executable, str(writer), str(tmp_path / "hostile"), str(count)], check=True)
    found = {way: cost(tmp_path / "hostile", change) for way, change in WAYS.items()}
    print(f"\nan index of {count} chunks; to reach with {COUNTS[-1]}: {TIME:.0f} s, {MEMORY / 1e6:.0f} MB")
    for way, own in found.items():
        print(f"  {way}: {own.seconds:.1f} s, {own.cpu:.1f} s of CPU time, {own.memory / 1e6:.0f} MB")
    own, ordinary = found.values()
    print(f"  {own.cpu / ordinary.cpu:.2f} of the CPU time, {own.memory / ordinary.memory:.2f} of the memory")
    assert any(f"{count // 8} chunks are beyond the end" in detail for detail in own.findings)
    assert own.findings == ordinary.findings
    assert own.memory < ordinary.memory / 2
    assert count < COUNTS[-1] or own.memory < MEMORY
