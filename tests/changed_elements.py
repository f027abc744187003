"""Change elements in a checkpoint's files and update the checksums, so that no checksum detects the change."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckpt_patches.audit.judging import record_checksums
from ckpt_patches.formats.checkpoint import Checkpoint, Shard

Bits: TypeAlias = npt.NDArray[np.uint32]


def change_elements(found: Checkpoint, shard: Shard, role: str, first: int, change: Callable[[Bits], Bits]) -> None:
    """Change the bits of a shard's fp32 state, from element `first` to the end of its first extent."""
    extent = shard.streams[role].extents[0]
    values = np.memmap(extent.path, np.uint32, "r+", extent.offset, (extent.nbytes // 4,))
    values[first:] = change(values[first:])
    values.flush()
    for record in found.records:
        if record.path == extent.path and record.offset <= extent.offset < record.offset + record.nbytes:
            record_checksums.update_checksum(record)
