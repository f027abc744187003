"""Zip archives as torch.save writes them: uncompressed records one after another, and then a directory.

Implements only the part of the format that torch needs. `zipfile` takes several times as long for a small file.
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
PART_64 = struct.Struct("<2H2Q")
PADDING = int.from_bytes(b"FB", "little")  # torch's kind for parts that only pad the field
HEADER_AT_ONCE = 512  # bytes to read for a record's header, name and extra field
AT_ONCE = 4096  # bytes to read at the begin and at the end of a file: all headers of a small file
READ_AT_ONCE = 1 << 24  # bytes of a record's data

CHECKSUM_BEHIND, NAME_IS_UTF8 = 8, 0x800  # a record's flags: the checksum follows the data
# Descriptor after such a record: signature, checksum, size, size.
BEHIND, BEHIND_64 = struct.Struct("<4s3L"), struct.Struct("<4sL2Q")
BEHIND_DATA = {0: (0,), CHECKSUM_BEHIND: (BEHIND.size, BEHIND_64.size)}  # bytes between two records, by flag
LARGE = 1 << 30  # bytes; from here on sizes have 64 bits, well below the limit of 4 GiB
VERSION, VERSION_64 = 20, 45  # of the format; readers must support it
FLAGS = (0, CHECKSUM_BEHIND, NAME_IS_UTF8, CHECKSUM_BEHIND | NAME_IS_UTF8)
FOLDER = 0x10  # an attribute: torch's reader takes a record with it for a folder, and leaves its memory uninitialised
FIRST_OF_1980 = 0x21  # the earliest date, so that files do not depend on the time of writing
ALIGNMENT = 64  # bytes; torch's, so that files can be memory-mapped


class Entry(NamedTuple):
    """A record's entry in the directory."""

    position: int  # of its header
    nbytes: int
    checksum: int
    method: int
    flags: int
    listed: int  # offset of the entry in the directory


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
        BadArchiveError: also by every method. The message does not name the file.
    """

    def __init__(self, descriptor: int, size: int, begin: int = 0) -> None:
        self._descriptor, self._size, self._begin = descriptor, size, begin
        self._head = os.pread(descriptor, min(AT_ONCE, size), begin)
        self._tail = os.pread(descriptor, AT_ONCE, begin + size - AT_ONCE) if size > AT_ONCE else self._head
        self._directory_at = 0
        self.entries = self._directory()
        ends = [*(entry.position for entry in self.entries.values()), self._directory_at][1:]
        self._ends = dict(zip(self.entries, ends, strict=True))

    def read(self, name: bytes) -> bytes:
        """The data of a small record. Verifies the checksum."""
        entry = self.entries[name]
        data = self._bytes(self.position(name) - self._begin, entry.nbytes)
        if crc32(data) != entry.checksum:
            raise BadArchiveError(f"the checksum of its record {name.decode('latin1')} is wrong")
        return data

    def stored(self, name: bytes) -> Stored:
        """The position of a record's data."""
        entry = self.entries[name]
        return Stored(self.position(name), entry.nbytes, entry.checksum)

    def checksum_places(self, name: bytes) -> tuple[int, int]:
        """The file offsets of a record's checksum: in the directory, and before or after its data."""
        entry = self.entries[name]
        if entry.flags & CHECKSUM_BEHIND:
            beside = self.position(name) + entry.nbytes + BEHIND_CHECKSUM
        else:
            beside = self._begin + entry.position + LOCAL_CHECKSUM
        return self._begin + self._directory_at + entry.listed + ENTRY_CHECKSUM, beside

    def position(self, name: bytes) -> int:
        """The file offset of a record's data, after its header. The directory does not state the header's length."""
        entry = self.entries[name]
        header = self._bytes(entry.position, min(HEADER_AT_ONCE, max(LOCAL.size, self._size - entry.position)))
        signature, flags, method, name_length, extra_length = LOCAL_READ.unpack_from(header)
        extra = LOCAL.size + name_length
        end: int = extra + extra_length
        agrees = signature == b"PK\3\4" and header[LOCAL.size : extra] == name
        if not agrees or flags != entry.flags or method != STORED or not _is_extra(header, extra, end):
            raise BadArchiveError(f"its record {name.decode('latin1')} is not what its directory says")
        # The next record follows: nothing else tells that the length of the extra field is another one.
        if self._ends[name] - entry.position - end - entry.nbytes not in BEHIND_DATA[flags & CHECKSUM_BEHIND]:
            raise BadArchiveError(f"its record {name.decode('latin1')} does not end where the next one begins")
        return self._begin + entry.position + end

    def _bytes(self, position: int, nbytes: int) -> bytes:
        if not 0 <= position <= self._size - nbytes:
            raise BadArchiveError(f"it ends before its byte {position + nbytes}")
        if position + nbytes <= len(self._head):
            return self._head[position : position + nbytes]
        from_tail = position - (self._size - len(self._tail))
        if from_tail >= 0:
            return self._tail[from_tail : from_tail + nbytes]
        return os.pread(self._descriptor, nbytes, self._begin + position)

    def _directory(self) -> dict[bytes, Entry]:
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
        self._directory_at = position
        return _entries(self._bytes(position, nbytes), count)


def update_checksum(descriptor: int, span: tuple[int, int], record: Stored) -> None:
    """Update the checksum of a record with new data, in an archive within a file that is open for writing.

    `span` is the archive's first byte and its length.

    Raises:
        BadArchiveError: the file ends before the record does.
    """
    archive = Archive(descriptor, span[1], span[0])
    (name,) = (name for name in archive.entries if archive.position(name) == record.offset)
    checksum, at, end = 0, record.offset, record.offset + record.nbytes
    while at < end:
        data = os.pread(descriptor, min(READ_AT_ONCE, end - at), at)
        if not data:
            raise BadArchiveError(f"expected {record.nbytes} bytes of {name!r}, found {at - record.offset}")
        checksum, at = crc32(data, checksum), at + len(data)
    for place in archive.checksum_places(name):
        os.pwrite(descriptor, struct.pack("<L", checksum), place)


def _entries(data: bytes, count: int) -> dict[bytes, Entry]:
    found: dict[bytes, Entry] = {}
    at = 0
    for _ in range(count):
        if at + ENTRY.size > len(data):
            raise BadArchiveError("its directory is damaged")
        (
            signature,
            version,
            flags,
            method,
            checksum,
            stored,
            nbytes,
            name,
            extra,
            comment,
            disk,
            attributes,
            position,
        ) = ENTRY_READ.unpack_from(data, at)
        name_end = at + ENTRY.size + name
        extra_end = name_end + extra
        if ELSEWHERE in (nbytes, stored, position):
            nbytes, stored, position = _of_64_bits((nbytes, stored, position), data[name_end:extra_end])
        if signature != b"PK\1\2" or stored != nbytes or comment or disk:
            raise BadArchiveError("its directory is damaged")
        own = data[at + ENTRY.size : name_end]
        if own in found:  # other readers can take the other one
            raise BadArchiveError(f"it has two records of the name {own.decode('latin1')}")
        if method != STORED or flags not in FLAGS or version > VERSION_64 or attributes & FOLDER:
            raise BadArchiveError(f"its record {own.decode('latin1')} is not stored as torch stores records")
        found[own] = Entry(position, nbytes, checksum, method, flags, at)
        at = extra_end
    if at != len(data):
        raise BadArchiveError("its directory is damaged")
    return found


def _of_64_bits(numbers: tuple[int, ...], extra: bytes) -> list[int]:
    """The numbers, with placeholders replaced from the extra field."""
    part, found = _parts(extra, 0, len(extra))[0].get(EXTRA_64, b""), []
    for number in numbers:
        if number == ELSEWHERE:
            if len(part) < 8:
                raise BadArchiveError("its directory is damaged")
            number, part = int.from_bytes(part[:8], "little"), part[8:]
        found.append(number)
    return found


def _parts(data: bytes, at: int, end: int) -> tuple[dict[int, bytes], int]:
    """The parts of an extra field, by kind, and the end of the last known one: the field's end if the field is valid.

    A field with a flipped bit in its length would begin with the record's data as parts.
    """
    found: dict[int, bytes] = {}
    while at + PART.size <= end:
        kind, length = PART.unpack_from(data, at)
        if kind not in (EXTRA_64, PADDING) or kind in found:
            break
        begin = at + PART.size
        at = begin + length
        found[kind] = data[begin:at]
    return found, at


def _is_extra(header: bytes, at: int, end: int) -> bool:
    """Whether a record's header ends with a valid extra field. Most have one part, or none."""
    if end > len(header):
        return False
    return (
        header[at : at + PART.size] == PART.pack(PADDING, max(0, end - at - PART.size))
        or _parts(header, at, end)[1] == end
    )


class File(Protocol):
    """The output of a `Writer`."""

    def write(self, data: Any) -> int: ...

    def tell(self) -> int: ...


class SparseFile(File, Protocol):
    """A file with parts that other code writes."""

    def skip(self, nbytes: int) -> object: ...


class Writer:
    """Writes an archive: record by record, and then its directory."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._directory: list[bytes] = []

    def add(self, name: bytes, data: Iterable[Any], nbytes: int = 0) -> None:
        """Write a record of at most `nbytes` bytes, in pieces. Its checksum follows the data, as torch writes it."""
        position = self._begin(name, nbytes >= LARGE)
        checksum = written = 0
        for piece in data:
            checksum = crc32(piece, checksum)
            written += len(piece)
            self._file.write(piece)
        self._end(name, position, Stored(0, written, checksum), nbytes >= LARGE)

    def leave_room(self, file: SparseFile, name: bytes, nbytes: int, checksum: int) -> int:
        """Add a record with data that other code writes into `file`, the archive's. Returns the data's offset."""
        position = self._begin(name, nbytes >= LARGE)
        stored = Stored(file.tell(), nbytes, checksum)
        file.skip(nbytes)
        self._end(name, position, stored, nbytes >= LARGE)
        return stored.offset

    def _begin(self, name: bytes, large: bool) -> int:
        """Write a record's header, and return its position."""
        position, version, size = self._file.tell(), VERSION_64 if large else VERSION, ELSEWHERE if large else 0
        extra = PART_64.pack(EXTRA_64, 16, 0, 0) if large else b""
        extra += _padding(position + LOCAL.size + len(name) + len(extra))
        numbers = (version, CHECKSUM_BEHIND, STORED, 0, FIRST_OF_1980, 0, size, size, len(name), len(extra))
        self._file.write(b"".join((LOCAL.pack(b"PK\3\4", *numbers), name, extra)))
        return position

    def _end(self, name: bytes, position: int, stored: Stored, large: bool) -> None:
        """Write the descriptor after a record's data."""
        behind = BEHIND_64 if large else BEHIND
        self._file.write(behind.pack(b"PK\7\x08", stored.checksum, stored.nbytes, stored.nbytes))
        self._directory.append(_entry(name, position, stored.nbytes, stored.checksum))

    def finish(self) -> None:
        """Write the directory."""
        position, data, count = self._file.tell(), b"".join(self._directory), len(self._directory)
        end = position + len(data)
        if max(position, len(data)) >= ELSEWHERE or count >= MANY:
            numbers = (END_64.size - 12, VERSION_64, VERSION_64, 0, 0, count, count, len(data), position)
            data += END_64.pack(b"PK\6\6", *numbers) + LOCATOR.pack(b"PK\6\7", 0, end, 1)
        few, nbytes, at = min(count, MANY), min(end - position, ELSEWHERE), min(position, ELSEWHERE)
        self._file.write(data + END.pack(b"PK\5\6", 0, 0, few, few, nbytes, at, 0))


def _entry(name: bytes, position: int, nbytes: int, checksum: int) -> bytes:
    """A record's entry in the directory."""
    large = [number for number in (nbytes, nbytes, position) if number >= ELSEWHERE]
    extra = PART.pack(EXTRA_64, 8 * len(large)) + struct.pack(f"<{len(large)}Q", *large) if large else b""
    version, size = VERSION_64 if large else VERSION, min(nbytes, ELSEWHERE)
    kind = (version, version, CHECKSUM_BEHIND, STORED, 0, FIRST_OF_1980)
    lengths = (len(name), len(extra), 0)
    entry = ENTRY.pack(b"PK\1\2", *kind, checksum, size, size, *lengths, 0, 0, 0, min(position, ELSEWHERE))
    return b"".join((entry, name, extra))


def _padding(position: int) -> bytes:
    """An extra field that moves the data to the next multiple of the alignment."""
    length = -(position + PART.size) % ALIGNMENT
    return PART.pack(PADDING, length) + bytes(length)
