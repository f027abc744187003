"""Compare the checksums that a checkpoint's files hold with those of the bytes read."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckpt_patches.audit.ranges import FileRanges
from ckpt_patches.formats import damages, stored_zip
from ckpt_patches.formats.checkpoint import Checkpoint, Extent, Record, Shard, Stream
from ckpt_patches.formats.checksum import combined, crc32
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.elements import PartRead
from ckpt_patches.formats.ranged import open_regular

AT_A_TIME = 1 << 22  # bytes
REST = "rest"  # the role of bytes that belong to no array


def rest(expected: Iterable[Record], shards: Iterable[Shard]) -> list[Shard]:
    """Shards for the bytes of records that no shard reads, needed for the checksums."""
    read = FileRanges(extent for shard in shards for extent in shard.extents)
    return [
        Shard(record.path, "", (gap.nbytes,), {REST: Stream(record.path, "uint8", (gap,))})
        for record in expected
        for gap in read.gaps(Extent(record.path, record.offset, record.nbytes))
    ]


def wrong(expected: Iterable[Record], pieces: Iterable[PartRead]) -> Iterator[Record]:
    """The records whose bytes, read in pieces, do not match their checksum."""
    by_start: dict[tuple[str, int], PartRead] = {}
    for piece in pieces:
        key = piece.path, piece.offset
        if key not in by_start or by_start[key].nbytes < piece.nbytes:
            by_start[key] = piece
    for record in expected:
        at, end, crc = record.offset, record.offset + record.nbytes, 0
        while at < end and (record.path, at) in by_start:
            piece = by_start[record.path, at]
            crc, at = combined(crc, piece.crc, piece.nbytes), at + piece.nbytes
        if _with_rest(record.path, at, end, crc) != record.crc:
            yield record


def _with_rest(path: str, begin: int, end: int, crc: int) -> int:
    """A checksum continued over bytes that were read in no piece from their begin on, as of tensors that overlap."""
    if begin >= end:
        return crc
    with os.fdopen(open_regular(path), "rb") as file:
        file.seek(begin)
        while data := file.read(min(AT_A_TIME, end - begin)):
            crc, begin = crc32(data, crc), begin + len(data)
    return crc


def findings(found: Checkpoint, pieces: Iterable[PartRead]) -> Iterator[Finding]:
    """Findings for records whose checksum is wrong."""
    arrays = {
        (extent.path, extent.offset): stream.array
        for shard in found.shards
        for stream in shard.streams.values()
        for extent in stream.extents
    }
    for record in wrong(found.records, pieces):
        array = arrays.get((record.path, record.offset), record.path)
        detail = f"checksum of {record.nbytes} bytes at {record.offset} in {Path(record.path).name}"
        yield Finding(damages.BAD_FILE, array, detail)


def update_checksum(record: Record) -> None:
    """Compute the checksum of a record's current bytes and write it into its zip."""
    with open(record.path, "r+b") as file:
        stored = stored_zip.Stored(record.offset, record.nbytes, record.crc)
        stored_zip.update_checksum(file.fileno(), record.zip, stored)
