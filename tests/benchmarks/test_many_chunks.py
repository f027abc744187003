"""What an index of two million chunks costs the audit before the first element is read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from upstream import REPOSITORY

COUNTS = (200_000, 2_000_000)  # chunks of one tensor, whose files are not there
TIME, MEMORY = 10.0, 1e9  # seconds and bytes. Not reached: 11 s of CPU time, and the pickle comes to 1.4 kB a chunk
MEASURED = """
import json, resource, sys, time
from pathlib import Path
from ckpt_patches.audit import audit
path, begin = Path(sys.argv[1]), time.perf_counter()
found = audit.audit(path).checkpoint
seconds, memory = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
cpu = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps([seconds, cpu, memory, [finding.detail for finding in found.findings]]))
"""


@pytest.mark.parametrize("count", COUNTS)
def test_an_index_of_chunks(count: int, tmp_path: Path) -> None:
    writer = REPOSITORY / "tests/programs/write_index_of_chunks.py"
    subprocess.run([sys.executable, str(writer), str(tmp_path / "hostile"), str(count)], check=True)
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "hostile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seconds, cpu, memory, findings = json.loads(done.stdout)
    print(f"\nan index of {count} chunks: audited in {seconds:.1f} s, {memory / 1e6:.0f} MB")
    print(f"  {cpu:.1f} s of CPU time, with the imports; to reach: {TIME:.0f} s, {MEMORY / 1e6:.0f} MB")
    assert any(f"{count // 8} chunks are beyond the end" in detail for detail in findings)
