"""What a process of a group tells the first one about its share of a checkpoint, as bytes.

They come from a file that others may be able to write, so nothing in them is run: a length, JSON, arrays of numbers.
"""

import json
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ckpt_patches.audit.checksums import PartRead
from ckpt_patches.audit.scan import Odd, OddRuns, Part, Tally
from ckpt_patches.errors import UserError

LENGTH = struct.Struct("<Q")
COLUMNS = ("<i8", "<i8", "<u2")  # of odd runs: begin, end, code


class Reply(NamedTuple):
    """Some of what was found in a share."""

    audit: int  # the number of the audit that it is of
    files: str  # a fingerprint of what is to be read of the whole checkpoint
    parts: list[Part]  # in order
    is_last: bool = False
    reason: tuple[str, str] | None = None  # why the share cannot be read to its end: of which file or array, and what


def encoded(reply: Reply) -> bytes:
    header = {
        "audit": reply.audit,
        "files": reply.files,
        "parts": [_described(part) for part in reply.parts],
        "is_last": reply.is_last,
        "reason": reply.reason,
    }
    data = json.dumps(header).encode()
    columns = [
        column.astype(dtype).tobytes()
        for part in reply.parts
        for column, dtype in zip(part.odd.runs, COLUMNS, strict=True)
    ]
    return b"".join([LENGTH.pack(len(data)), data, *columns])


def _described(part: Part) -> dict[str, Any]:
    return {
        "shard": part.shard,
        "runs": len(part.odd.runs.code),
        "is_cut": part.odd.is_cut,
        "tallies": [[bit, *tally] for bit, tally in part.odd.tallies.items()],
        "pieces": part.pieces,
    }


def decoded(data: bytes) -> Reply:
    """What `encoded` was given.

    Raises:
        UserError: it was something else.
    """
    try:
        end = LENGTH.size + LENGTH.unpack_from(data)[0]
        header = json.loads(data[LENGTH.size : end])
        arrays = _Arrays(data, end)
        parts = [_part(described, arrays) for described in header["parts"]]
        reason = tuple(map(str, header["reason"])) if header["reason"] else None
        assert reason is None or len(reason) == 2
        if arrays.at != len(data):
            raise ValueError(f"{len(data) - arrays.at} bytes too many")
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise UserError(f"what a process of the group sent is no reply: {type(error).__name__}: {error}") from None
    return Reply(int(header["audit"]), str(header["files"]), parts, bool(header["is_last"]), reason)


class _Arrays:
    """Arrays behind each other."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self.at = data, at

    def take(self, count: int) -> Iterator[Any]:
        for dtype in COLUMNS:
            yield np.frombuffer(self._data, dtype, count, self.at)
            self.at += count * np.dtype(dtype).itemsize


def _part(described: dict[str, Any], arrays: _Arrays) -> Part:
    runs = OddRuns(*arrays.take(int(described["runs"])))
    tallies = {bit: Tally(*own) for bit, *own in described["tallies"]}
    pieces = [PartRead(*piece) for piece in described["pieces"]]
    return Part(int(described["shard"]), Odd(runs, bool(described["is_cut"]), tallies), pieces)
