"""Check, before unpickling, that a pickle does not request more memory than its own length justifies.

Python's unpickler allocates memory as soon as an opcode names memo index 2,000,000,000 or the length of a bytearray.
`pickletools` could find such opcodes, too, but takes three times as long, and there are thousands of files.
https://docs.python.org/3/library/pickletools.html
"""

import re
from pickle import UnpicklingError

# Bytes that follow each opcode.
_FIXED = {
    **dict.fromkeys(b".()012NQRabdelostu]}\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98", 0),
    **dict.fromkeys(b"Khq\x80\x82", 1),
    **dict.fromkeys(b"M\x83", 2),
    **dict.fromkeys(b"Jj\x84", 4),
    **dict.fromkeys(b"G\x95", 8),
}
# Opcodes followed by a length field of so many bytes, and then by data of this length.
_COUNTED = {**dict.fromkeys(b"CU\x8a\x8c", 1), **dict.fromkeys(b"BTX\x8b", 4), **dict.fromkeys(b"\x8d\x8e\x96", 8)}
# Opcodes followed by so many lines.
_LINES = {**dict.fromkeys(b"FILPSVgp", 1), **dict.fromkeys(b"ci", 2)}
_KEEP, _KEEP_AS_TEXT = ord("r"), ord("p")  # memoize; the index is four bytes, or a line of text
_STOP = ord(".")

_WIDTHS = [_FIXED.get(opcode, -1) for opcode in range(256)]


def _of_width(width: int) -> bytes:
    """A pattern of the opcodes with `width` bytes after them, except STOP."""
    opcodes = b"".join(re.escape(bytes([code])) for code, own in _FIXED.items() if own == width and code != _STOP)
    return b"[%b].{%d}" % (opcodes, width)


# Short strings, such as file names: a length byte, and then so many bytes.
_SHORT = b"\x8c(?:%b)" % b"|".join(re.escape(bytes([length])) + b".{%d}" % length for length in range(32))
# A run of these. An index has millions; the limit keeps the regex stack small.
_RUN = re.compile(b"(?:%b|%b){1,4096}" % (b"|".join(map(_of_width, sorted(set(_FIXED.values())))), _SHORT), re.DOTALL)


def check(data: bytes) -> None:
    """Check a pickle's opcodes up to its end.

    Raises:
        UnpicklingError: a memo index exceeds the length, or the data is truncated or not a pickle.
    """
    at, size = 0, len(data)
    while at < size:
        if found := _RUN.match(data, at):
            at = found.end()
        elif data[at] == _STOP:
            return
        else:
            at = _end_of(data, at)
    raise UnpicklingError(f"expected the end of a pickle, found that of its {size} bytes")


def _end_of(data: bytes, at: int) -> int:
    """The end of an opcode and its argument; beyond the end of the data if the pickle is truncated.

    Raises:
        UnpicklingError: a memo index exceeds the pickle's length, or the byte is not an opcode.
    """
    opcode = data[at]
    if (width := _WIDTHS[opcode]) >= 0:
        return at + 1 + width
    if opcode == _KEEP:
        if int.from_bytes(data[at + 1 : at + 5], "little") > len(data):
            raise _too_far(at)
        return at + 5
    if opcode in _COUNTED:
        begin = at + 1 + _COUNTED[opcode]
        return begin + int.from_bytes(data[at + 1 : begin], "little")
    return _behind_lines(data, at, opcode)


def _behind_lines(data: bytes, at: int, opcode: int) -> int:
    if opcode not in _LINES:
        raise UnpicklingError(f"expected an opcode of a pickle at its byte {at}, found {opcode:#04x}")
    end = at
    for _ in range(_LINES[opcode]):
        end = data.find(b"\n", end + 1)
        if end < 0:
            raise UnpicklingError(f"expected a line at byte {at} of a pickle, found its end")
    if opcode == _KEEP_AS_TEXT and (end - at > 20 or not 0 <= int(data[at + 1 : end]) <= len(data)):
        raise _too_far(at)
    return end + 1


def _too_far(at: int) -> UnpicklingError:
    return UnpicklingError(f"at its byte {at} a pickle keeps a value at a place beyond all that it can hold")
