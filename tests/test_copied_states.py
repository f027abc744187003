"""States that are copies of each other: damage, but for the padding of a bucket, which is uninitialized memory."""

from pathlib import Path

import numpy as np
import pytest

from ckpt_patches.audit.readers.checkpoint import EXP_AVG, MASTER, Checkpoint, Extent, Shard, Stream
from ckpt_patches.audit.readers.copied_states import findings

NUMBERS, DENORMAL = [0.0, 1e-3, 2.0, 0.0], [0.0, 1e-45, 0.0, 1.7e-44]


@pytest.mark.parametrize(
    ("values", "has_rows", "count"),
    [(NUMBERS, False, 1), (DENORMAL, False, 0), (NUMBERS, True, 1), (DENORMAL, True, 1), ([0.0] * 4, True, 0)],
)
def test_a_copy_is_found(values: list[float], has_rows: bool, count: int, tmp_path: Path) -> None:
    path = tmp_path / "states"
    data = np.array(values, "<f4").tobytes()
    path.write_bytes(data * 2)
    streams = {
        role: Stream(role, "float32", (Extent(str(path), number * len(data), len(data)),))
        for number, role in enumerate((MASTER, EXP_AVG))
    }
    found = Checkpoint(tmp_path, "megatron torch_dist", shards=[Shard("bucket", "0", (4,), streams, has_rows=has_rows)])
    assert len(list(findings(found))) == count
