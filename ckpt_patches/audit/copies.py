"""A checkpoint's elements in its copy, which a repair writes: nothing outside of it, whatever the metadata says."""

import itertools
import os
from pathlib import Path

from ckpt_patches.audit.checkpoint import Stream
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.paths import path_within


def in_copy(name: str, path: Path, copy: Path) -> str:
    """The file of the copy that stands for one of the checkpoint at `path`.

    Raises:
        LeavesFolderError: it would be outside of the copy.
        ValueError: the file is not the checkpoint's.
    """
    return str(path_within(copy, str(Path(name).relative_to(path))))


def copied(stream: Stream, path: Path, copy: Path) -> Stream:
    """A stream of the checkpoint, in the copy."""
    extents = tuple(extent._replace(path=in_copy(extent.path, path, copy)) for extent in stream.extents)
    return stream._replace(extents=extents)


def write_elements(target: Stream, begin: int, data: bytes | memoryview) -> None:
    """Write elements from that one on. A file that is missing is made."""
    first, nbytes = begin * item_size(target.dtype), len(data)
    ends = itertools.accumulate(extent.nbytes for extent in target.extents)
    for extent, stop in zip(target.extents, ends, strict=True):
        start = stop - extent.nbytes
        low, high = max(first, start), min(first + nbytes, stop)
        if low < high:
            with open(extent.path, "r+b" if os.path.exists(extent.path) else "wb") as file:
                file.seek(extent.offset + low - start)
                file.write(data[low - first : high - first])
