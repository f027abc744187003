"""The cost of planning for ten thousand rank files, before any element is read: the converter's, and the audit's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from upstream import newest, run, tree

COUNTS = (1000, 3000, 10_000)  # rank files
PARAMETERS, ELEMENTS = 720, 97_222_222  # 70e9 elements, with 12 bytes of state each
TIME, MEMORY = 10.0, 500e6  # targets for the most files: seconds and bytes

CONVERTER = """
from ckpt_patches.convert import traits
from ckpt_patches.convert.conversion_plan import plan
from ckpt_patches.formats import zero_checkpoint
known, _ = traits.installed()
found = zero_checkpoint.read(path / "global_step7")
work = len(plan(found, known, strict=True).outputs)
"""
AUDIT = """
from ckpt_patches.audit import audit
from ckpt_patches.audit.judging import coverage, scan
found = audit.reader_of(path / "global_step7")(path / "global_step7")
found.shards += coverage.others(found)
assert found.findings == [], found.findings[:3]
shards = audit.all_shards(found)
work = sum(1 for _ in scan.spans(shards, frozenset(record.path for record in found.records)))
"""
MEASURED = """
import json, resource, sys, time
from pathlib import Path
path, begin = Path(sys.argv[1]), time.perf_counter()
{code}
taken = time.perf_counter() - begin
counted = dict(line.split(": ") for line in open("/proc/self/io"))
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
cpu = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps([taken, cpu, memory, work, int(counted["rchar"]), int(counted["syscr"])]))
"""


@pytest.fixture(scope="module", params=COUNTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp(f"ranks-{request.param}")
    release = tree("deepspeed", newest("deepspeed"))
    run("write_sparse_ranks", folder, *map(str, (request.param, PARAMETERS, ELEMENTS)), tree=release)
    return request.param, folder


@pytest.mark.parametrize("tool", ["converter", "audit"])
def test_the_plan_of_many_rank_files(tool: str, checkpoint: tuple[int, Path]) -> None:
    count, folder = checkpoint
    code = MEASURED.format(code={"converter": CONVERTER, "audit": AUDIT}[tool])
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seconds, cpu, memory, work, nbytes, reads = json.loads(done.stdout)
    size = sum(path.stat().st_size for path in (folder / "global_step7").iterdir())
    print(f"\n{tool}: {count} rank files of {size / 1e9:.0f} GB are planned in {seconds:.1f} s, {memory / 1e6:.0f} MB")
    print(f"  {cpu:.1f} s of CPU time, with the imports")
    print(f"  {work} pieces of work; {nbytes / count / 1e3:.1f} kB and {reads / count:.1f} reads a file")
    if count == max(COUNTS):
        print(f"  to reach: {TIME:.0f} s, {MEMORY / 1e6:.0f} MB")
        assert seconds < TIME
        assert memory < MEMORY
