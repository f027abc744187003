"""Draw docs/holes.svg: the `ckpt-patches audit --plot` of two damaged checkpoints from real training runs.

python tests/holes_page.py
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import generated
from ckpt_patches.audit.audit import Report, audit
from ckpt_patches.audit.readers.checkpoint import EXP_AVG, EXP_AVG_SQ, MASTER
from ckpt_patches.audit.report import plot
from megatron_checkpoints import ZARR, written
from test_audit import UP, copied, flip_one_bit_of_a_master, put_nan
from upstream import REPOSITORY
from zero_checkpoints import trained

PICTURE = REPOSITORY / "docs" / "holes.svg"


def damaged(folder: Path) -> list[Report]:
    """Audits of zarr without a rank's slice of two states, with two bad elements, and of ZeRO without a rank's part."""
    zarr = copied(written(ZARR).whole[-1], folder)
    put_nan(zarr)
    flip_one_bit_of_a_master(zarr)
    for role in (MASTER, EXP_AVG):
        _lose_a_slice(zarr, UP, role)
    zero = copied(trained("0.16.2", "stage2", "stage3")["stage2"], folder)
    for role in (MASTER, EXP_AVG, EXP_AVG_SQ):
        _lose_a_slice(zero, "w1.weight", role)
    return [audit(zarr), audit(zero)]


def _lose_a_slice(path: Path, parameter: str, role: str) -> None:
    """Set rank 1's part of a parameter's state to zero."""
    found = audit(path).checkpoint
    shard = next(shard for shard in found.shards if shard.parameter == parameter and role in shard.streams)
    part = shard.numel // (found.data_parallel or 1)
    begin, end = (shard.owners[1].begin, shard.owners[1].end) if shard.owners else (part, 2 * part)
    at = 0
    for extent in shard.streams[role].extents:
        size = extent.nbytes // np.dtype(np.float32).itemsize
        first, last = max(begin, at) - at, min(end, at + size) - at
        if first < last:
            values: np.memmap[Any, Any] = np.memmap(extent.path, np.float32, "r+", extent.offset, (size,))
            values[first:last] = 0
            values.flush()
        at += size


def write() -> None:
    plot.require(PICTURE)
    with tempfile.TemporaryDirectory() as folder:
        plot.draw(damaged(Path(folder)), PICTURE)
    PICTURE.write_text(generated.themed(PICTURE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
    print(f"wrote {PICTURE}")
