"""Zip archives as torch.save writes them: uncompressed records one after another, and then a directory.

An archive is read straight through. Each record must begin where the one before it ends, and its header must be what
the directory says; all else is refused. `zipfile` accepts more, and takes several times as long for a small file.
https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

import os
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from ckpt_patches.formats.checksum import crc32

STORED = 0  # the method of an uncompressed record
# Record header: signature, version, flags, method, time, date, checksum, size, size, lengths of name and extra field.
# The name and the extra field follow.
LOCAL, LOCAL_READ = struct.Struct("<4s5H3L2H"), struct.Struct("<4s2x2H16x2H")  # to read: only what is checked
LOCAL_CHECKSUM, ENTRY_CHECKSUM, BEHIND_CHECKSUM = 14, 16, 4  # offsets of the checksum in a record's headers
# Directory entry: signature, version, version, flags, method, time, date, checksum, size, size, lengths of
# name, extra field and comment, disk, attributes, attributes, position of the record.
ENTRY, ENTRY_READ = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s2x3H4x3L4H2x2L")
# End record: signature, disk, disk, records, records, bytes and position of the directory, length of the comment.
END = struct.Struct("<4s4H2LH")
# With more than 32 bits, a second end record is before it, and between the two a locator with its position.
LOCATOR = struct.Struct("<4sLQL")
END_64 = struct.Struct("<4sQ2H2L4Q")
ELSEWHERE, MANY = 0xFFFFFFFF, 0xFFFF  # placeholders for larger numbers
# An extra field has parts: kind, length, and that many bytes. The kind EXTRA_64 has 64-bit numbers.
PART, EXTRA_64 = struct.Struct("<2H"), 1
PART_64, ENTRY_64 = struct.Struct("<2H2Q"), struct.Struct("<2H3Q")  # of a record's header, of an entry
PADDING = int.from_bytes(b"FB", "little")  # torch's kind for parts that only pad the field
HEADER_AT_ONCE = 512  # bytes to read for a record's header, name and extra field
AT_ONCE = 4096  # bytes to read at the begin and at the end of a file: all headers of a small file
READ_AT_ONCE = 1 << 24  # bytes of a record's data
LARGEST_READ = 256 << 20  # bytes of a record that is no tensor's

CHECKSUM_BEHIND, NAME_IS_UTF8 = 8, 0x800  # a record's flags: the checksum follows the data
# Descriptor after such a record: signature, checksum, size, size.
BEHIND, BEHIND_64 = struct.Struct("<4s3L"), struct.Struct("<4sL2Q")
BEHIND_DATA = {0: (0,), CHECKSUM_BEHIND: (BEHIND.size, BEHIND_64.size)}  # bytes between two records, by flag
VERSION_64 = 45  # of the format, with sizes of 64 bits; readers must support it
FLAGS = (0, CHECKSUM_BEHIND, NAME_IS_UTF8, CHECKSUM_BEHIND | NAME_IS_UTF8)
FOLDER = 0x10  # an attribute: torch's reader takes a record with it for a folder, and leaves its memory uninitialised
FIRST_OF_1980 = 0x21  # the earliest date, so that files do not depend on the time of writing
ALIGNMENT = 64  # bytes; torch's, so that files can be memory-mapped


class BadArchiveError(ValueError):
    """An archive that is damaged, or that torch does not write."""


class NoDirectoryError(BadArchiveError):
    """A truncated archive, or not an archive."""


class Stored(NamedTuple):
    """The position of a record's data, in bytes from the start of the file, and its checksum."""

    offset: int
    nbytes: int
    checksum: int


class Archive:
    """The records, by name, of an archive in an open file: `size` bytes from `begin` on.

    Raises:
        BadArchiveError: also by `read`. The message does not name the file.
    """

    def __init__(self, descriptor: int, size: int, begin: int = 0) -> None:
        self._descriptor, self._size, self._begin = descriptor, size, begin
        self._head = os.pread(descriptor, min(AT_ONCE, size), begin)
        self._tail = os.pread(descriptor, AT_ONCE, begin + size - AT_ONCE) if size > AT_ONCE else self._head
        self.records: dict[str, Stored] = {}
        self.checksum_places: dict[str, tuple[int, int]] = {}  # their file offsets: in the directory, and the record's
        self._ends: tuple[int, ...] = (0,)  # where the next record can begin
        directory, nbytes, count = self._directory()
        data, at = self._bytes(directory, nbytes), 0
        for _ in range(count):
            at = self._add(data, at, directory)
        if at != nbytes:
            raise BadArchiveError("its directory is damaged")
        self._check_begin(directory, "directory")

    def read(self, name: str) -> bytes:
        """The data of a small record. Verifies the checksum."""
        offset, nbytes, checksum = self.records[name]
        if nbytes > LARGEST_READ:  # of a sparse file, say
            raise BadArchiveError(f"its record {name} has {nbytes} bytes")
        data = self._bytes(offset - self._begin, nbytes)
        if crc32(data) != checksum:
            raise BadArchiveError(f"the checksum of its record {name} is wrong")
        return data

    def _bytes(self, position: int, nbytes: int) -> bytes:
        if not 0 <= position <= self._size - nbytes:
            raise BadArchiveError(f"it ends before its byte {position + nbytes}")
        if position + nbytes <= len(self._head):
            return self._head[position : position + nbytes]
        from_tail = position - (self._size - len(self._tail))
        if from_tail >= 0:
            return self._tail[from_tail : from_tail + nbytes]
        return os.pread(self._descriptor, nbytes, self._begin + position)

    def _directory(self) -> tuple[int, int, int]:
        """The position, bytes and records of the directory."""
        end = self._size - END.size
        if end < 0:
            raise NoDirectoryError("it is too short")
        signature, *disks, count, nbytes, position, comment = END.unpack(self._bytes(end, END.size))
        if signature != b"PK\5\6" or comment:
            raise NoDirectoryError("it has no directory of records at its end")
        locator = self._bytes(end - LOCATOR.size, LOCATOR.size) if end >= LOCATOR.size else b""
        if locator[:4] == b"PK\6\7":
            _, disk, end, all_disks = LOCATOR.unpack(locator)
            signature, size, _, _, *more, count, nbytes, position = END_64.unpack(self._bytes(end, END_64.size))
            if (signature, size) != (b"PK\6\6", END_64.size - 12) or (disk, all_disks) != (0, 1):
                raise BadArchiveError("its directory is not where it should be")
            disks = [*disks[:2], *more]
        if any(disks[:-1]) or disks[-1] != count:
            raise BadArchiveError("it is a part of an archive of several files")
        if position + nbytes != end:
            raise BadArchiveError("its directory does not end where it should")
        return position, nbytes, count

    def _add(self, data: bytes, at: int, directory: int) -> int:
        """Add the record of the entry at this offset of the directory's data; return the offset of the next entry."""
        if at + ENTRY.size > len(data):
            raise BadArchiveError("its directory is damaged")
        entry = ENTRY_READ.unpack_from(data, at)
        signature, version, flags, method, checksum, stored, nbytes, length, extra, comment, disk = entry[:11]
        attributes, position = entry[11:]
        name_end = at + ENTRY.size + length
        end: int = name_end + extra
        raw, more = data[at + ENTRY.size : name_end], data[name_end:end]
        if ELSEWHERE in (nbytes, stored, position):
            nbytes, stored, position = _of_64_bits((nbytes, stored, position), more)
        if signature != b"PK\1\2" or stored != nbytes or comment or disk:
            raise BadArchiveError("its directory is damaged")
        name = _name(raw)
        if name in self.records:  # other readers can take the other one
            raise BadArchiveError(f"it has two records of the name {name}")
        if method != STORED or flags not in FLAGS or version > VERSION_64 or attributes & FOLDER:
            raise BadArchiveError(f"its record {name} is not stored as torch stores records")
        self._check_begin(position, f"record {name}")
        begin = self._after_header(position, raw, flags, name)
        self.records[name] = Stored(self._begin + begin, nbytes, checksum)
        self._ends = tuple(begin + nbytes + behind for behind in BEHIND_DATA[flags & CHECKSUM_BEHIND])
        beside = begin + nbytes + BEHIND_CHECKSUM if flags & CHECKSUM_BEHIND else position + LOCAL_CHECKSUM
        self.checksum_places[name] = self._begin + directory + at + ENTRY_CHECKSUM, self._begin + beside
        return end

    def _check_begin(self, position: int, what: str) -> None:
        # Nothing else tells that the length of a record's extra field is another one.
        if position not in self._ends:
            raise BadArchiveError(f"its {what} does not begin where the record before it ends")

    def _after_header(self, position: int, name: bytes, flags: int, shown: str) -> int:
        """Where a record's data begins. The directory does not state it."""
        header = self._bytes(position, min(HEADER_AT_ONCE, max(LOCAL.size, self._size - position)))
        signature, own_flags, method, length, extra = LOCAL_READ.unpack_from(header)
        begin: int = LOCAL.size + length
        end: int = begin + extra
        same = (signature, own_flags, method, header[LOCAL.size : begin]) == (b"PK\3\4", flags, STORED, name)
        if not same or end > len(header) or _parts(header[begin:end]) is None:
            raise BadArchiveError(f"its record {shown} is not what its directory says")
        return position + end


def _name(raw: bytes) -> str:
    """A record's name. torch refuses names that are not UTF-8."""
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise BadArchiveError("the name of a record is not UTF-8") from None
    if "\0" in name or name.endswith("/"):
        raise BadArchiveError(f"its record {name!r:.200} has a name that torch does not write")
    return name


def update_checksum(descriptor: int, span: tuple[int, int], record: Stored) -> None:
    """Update the checksum of a record with new data, in an archive within a file that is open for writing.

    `span` is the archive's first byte and its length.

    Raises:
        BadArchiveError: the file ends before the record does.
    """
    archive = Archive(descriptor, span[1], span[0])
    (name,) = (name for name, own in archive.records.items() if own.offset == record.offset)
    checksum, at, end = 0, record.offset, record.offset + record.nbytes
    while at < end:
        data = os.pread(descriptor, min(READ_AT_ONCE, end - at), at)
        if not data:
            raise BadArchiveError(f"expected {record.nbytes} bytes of {name!r}, found {at - record.offset}")
        checksum, at = crc32(data, checksum), at + len(data)
    for place in archive.checksum_places[name]:
        os.pwrite(descriptor, struct.pack("<L", checksum), place)


def _of_64_bits(numbers: tuple[int, ...], extra: bytes) -> list[int]:
    """The numbers, with placeholders replaced from the extra field."""
    part, found = (_parts(extra) or {}).get(EXTRA_64, b""), []
    for number in numbers:
        if number == ELSEWHERE:
            if len(part) < 8:
                raise BadArchiveError("its directory is damaged")
            number, part = int.from_bytes(part[:8], "little"), part[8:]
        found.append(number)
    return found


def _parts(data: bytes) -> dict[int, bytes] | None:
    """The parts of an extra field, by kind; None if the field is invalid.

    A field with a flipped bit in its length would begin with the record's data as parts.
    """
    found: dict[int, bytes] = {}
    at = 0
    while at + PART.size <= len(data):
        kind, length = PART.unpack_from(data, at)
        if kind not in (EXTRA_64, PADDING) or kind in found:
            return None
        at += PART.size + length
        found[kind] = data[at - length : at]
    return found if at == len(data) else None


class File(Protocol):
    """The output of a `Writer`."""

    def write(self, data: Any) -> int: ...

    def tell(self) -> int: ...


class Writer:
    """Writes an archive: record by record, and then its directory. All sizes and positions have 64 bits."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._directory: list[bytes] = []

    def add(self, name: bytes, data: Iterable[Any]) -> None:
        """Write a record, in pieces."""
        position = self.begin(name)
        checksum = written = 0
        for piece in data:
            checksum = crc32(piece, checksum)
            written += len(piece)
            self._file.write(piece)
        self.end(name, position, written, checksum)

    def begin(self, name: bytes) -> int:
        """Write a record's header, and return its position. The data follows, at the next multiple of the alignment."""
        position = self._file.tell()
        extra = PART_64.pack(EXTRA_64, 16, 0, 0)
        padding = -(position + LOCAL.size + len(name) + len(extra) + PART.size) % ALIGNMENT
        extra += PART.pack(PADDING, padding) + bytes(padding)
        numbers = (VERSION_64, CHECKSUM_BEHIND, STORED, 0, FIRST_OF_1980, 0, ELSEWHERE, ELSEWHERE)
        self._file.write(b"".join((LOCAL.pack(b"PK\3\4", *numbers, len(name), len(extra)), name, extra)))
        return position

    def end(self, name: bytes, position: int, nbytes: int, checksum: int) -> None:
        """Write the checksum and sizes behind a record's data, as torch does."""
        self._file.write(BEHIND_64.pack(b"PK\7\x08", checksum, nbytes, nbytes))
        extra = ENTRY_64.pack(EXTRA_64, 24, nbytes, nbytes, position)
        kind = (VERSION_64, VERSION_64, CHECKSUM_BEHIND, STORED, 0, FIRST_OF_1980)
        lengths = (len(name), len(extra), 0)
        entry = ENTRY.pack(b"PK\1\2", *kind, checksum, ELSEWHERE, ELSEWHERE, *lengths, 0, 0, 0, ELSEWHERE)
        self._directory.append(b"".join((entry, name, extra)))

    def finish(self) -> None:
        """Write the directory."""
        position, data, count = self._file.tell(), b"".join(self._directory), len(self._directory)
        numbers = (END_64.size - 12, VERSION_64, VERSION_64, 0, 0, count, count, len(data), position)
        end = END_64.pack(b"PK\6\6", *numbers) + LOCATOR.pack(b"PK\6\7", 0, position + len(data), 1)
        self._file.write(data + end + END.pack(b"PK\5\6", 0, 0, MANY, MANY, ELSEWHERE, ELSEWHERE, 0))
