"""The records of torch's zip files, in a file of their own or inside a larger one, and the checksums of their bytes."""

import io
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator
from functools import reduce
from pathlib import Path

from ckpt_patches.audit.checkpoint import Extent, Record, Shard, Stream
from ckpt_patches.formats.checksum import crc32

REST = "rest"  # the role of bytes that belong to no array
# A zip's local header: the lengths of the name and of the extra field are its last two numbers.
LOCAL = struct.Struct("<26x2H")
# An entry of its directory, with the lengths of its name, extra field and comment, which follow.
DIRECTORY = struct.Struct("<28x3H12x")
AT_A_TIME = 1 << 24  # bytes


Piece = Record  # a part of a file that was read, and its checksum


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: int, offset: int, nbytes: int) -> None:
        self.file, self.offset, self.nbytes, self.at = file, offset, nbytes, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + (0, self.at, self.nbytes)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        wanted = max(min(len(buffer), self.nbytes - self.at), 0)
        count = os.preadv(self.file, [memoryview(buffer)[:wanted]], self.offset + self.at) if wanted else 0
        self.at += count
        return count


def records(path: str | Path, spans: Iterable[tuple[int, int]] | None = None) -> Iterator[dict[str, Record]]:
    """The records of each zip in a file, by the end of their names as "data/0"; `spans` are (offset, bytes).

    Raises:
        zipfile.BadZipFile: one is no whole zip.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        for offset, nbytes in [(0, size)] if spans is None else spans:
            window = _Window(file.fileno(), offset, nbytes)
            if offset + nbytes > size:
                raise zipfile.BadZipFile(f"ends at byte {size}, before its record at {offset}, {nbytes}")
            found = {}
            for info in zipfile.ZipFile(io.BufferedReader(window)).infolist():
                header = os.pread(file.fileno(), LOCAL.size, offset + info.header_offset)
                begin = offset + info.header_offset + LOCAL.size + sum(LOCAL.unpack(header))
                found[info.filename.partition("/")[2]] = Record(
                    str(path), begin, info.file_size, info.CRC, (offset, nbytes)
                )
            yield found


def rest(expected: Iterable[Record], shards: Iterable[Shard]) -> list[Shard]:
    """What no shard reads of the records: it is read as well, for the checksums."""
    read: dict[str, list[tuple[int, int]]] = {}
    for shard in shards:
        for stream in shard.streams.values():
            for extent in stream.extents:
                read.setdefault(extent.path, []).append((extent.offset, extent.offset + extent.nbytes))
    for ranges in read.values():
        ranges.sort()
    return [
        Shard(
            record.path,
            "",
            (end - begin,),
            {REST: Stream(record.path, "uint8", (Extent(record.path, begin, end - begin),))},
        )
        for record in expected
        for begin, end in _gaps(record.offset, record.offset + record.nbytes, read.get(record.path, []))
    ]


def _gaps(begin: int, end: int, ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for first, last in ranges:
        if last > begin and first < end:
            if first > begin:
                yield begin, first
            begin = max(begin, last)
    if begin < end:
        yield begin, end


def wrong(expected: Iterable[Record], pieces: Iterable[Piece]) -> Iterator[Record]:
    """The records whose bytes, read in pieces, are not what the checksum is of."""
    by_start: dict[tuple[str, int], Piece] = {}
    for piece in pieces:
        key = piece.path, piece.offset
        if key not in by_start or by_start[key].nbytes < piece.nbytes:
            by_start[key] = piece
    for record in expected:
        at, crc = record.offset, 0
        while at < record.offset + record.nbytes and (record.path, at) in by_start:
            piece = by_start[record.path, at]
            crc, at = combined(crc, piece.crc, piece.nbytes), at + piece.nbytes
        if at == record.offset + record.nbytes and crc != record.crc:
            yield record


def update_checksum(record: Record) -> None:
    """Write the checksum of what a record holds now into its zip: in the directory, and behind or before its data."""
    with open(record.path, "r+b") as file:
        crc = 0
        for begin in range(0, record.nbytes, AT_A_TIME):
            count = min(AT_A_TIME, record.nbytes - begin)
            crc = crc32(os.pread(file.fileno(), count, record.offset + begin), crc)
        for at in _checksum_places(file.fileno(), record):
            os.pwrite(file.fileno(), struct.pack("<L", crc), at)


def _checksum_places(file: int, record: Record) -> Iterator[int]:
    """Where in the file a record's checksum stands."""
    offset, nbytes = record.zip
    archive = zipfile.ZipFile(io.BufferedReader(_Window(file, offset, nbytes)))
    at = offset + archive.start_dir
    for info in archive.infolist():
        name, extra, comment = DIRECTORY.unpack(os.pread(file, DIRECTORY.size, at))
        header = offset + info.header_offset
        if header + LOCAL.size + sum(LOCAL.unpack(os.pread(file, LOCAL.size, header))) == record.offset:
            yield at + 16
            # Behind the data: a signature and the checksum; or else it is in the local header.
            has_descriptor = info.flag_bits & 8
            yield record.offset + record.nbytes + 4 if has_descriptor else header + 14
        at += DIRECTORY.size + name + extra + comment


# CRC-32 is linear: the checksum of a text with zeros behind it is a matrix of bits times that of the text.

Matrix = tuple[int, ...]  # the columns


def combined(first: int, second: int, nbytes: int) -> int:
    """The checksum of two texts behind each other, from theirs and the length of the second."""
    power = _ZERO_BYTE
    while nbytes:
        if nbytes & 1:
            first = _times(power, first)
        nbytes >>= 1
        if nbytes:
            power = _squared(power)
    return first ^ second


def _times(matrix: Matrix, vector: int) -> int:
    return reduce(lambda found, column: found ^ column[1] if vector >> column[0] & 1 else found, enumerate(matrix), 0)


_SQUARES: dict[Matrix, Matrix] = {}


def _squared(matrix: Matrix) -> Matrix:
    if matrix not in _SQUARES:
        _SQUARES[matrix] = tuple(_times(matrix, column) for column in matrix)
    return _SQUARES[matrix]


def _after_zero_byte(crc: int) -> int:
    # zlib inverts what goes in and what comes out; without that a zero text keeps the map linear.
    return crc32(b"\0", crc ^ 0xFFFFFFFF) ^ 0xFFFFFFFF


_ZERO_BYTE: Matrix = tuple(_after_zero_byte(1 << bit) for bit in range(32))
