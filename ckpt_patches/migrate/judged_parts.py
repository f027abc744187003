"""What was odd in a file of the output, as bytes: a length, JSON, arrays of numbers. Nothing of it is run."""

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ckpt_patches.audit.judging.record_checksums import PartRead
from ckpt_patches.audit.judging.scan import Odd, OddRuns, Part, Tally
from ckpt_patches.errors import UserError

LENGTH = struct.Struct("<Q")
COLUMNS = ("<i8", "<i8", "<u2")  # of odd runs: begin, end, code


def encoded(parts: Sequence[Part]) -> bytes:
    data = json.dumps([_described(part) for part in parts]).encode()
    columns = [
        column.astype(dtype).tobytes() for part in parts for column, dtype in zip(part.odd.runs, COLUMNS, strict=True)
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


def decoded(data: bytes) -> list[Part]:
    """What `encoded` was given.

    Raises:
        UserError: it was something else.
    """
    try:
        end = LENGTH.size + LENGTH.unpack_from(data)[0]
        arrays = _Arrays(data, end)
        parts = [_part(described, arrays) for described in json.loads(data[LENGTH.size : end])]
        if arrays.at != len(data):
            raise ValueError(f"{len(data) - arrays.at} bytes too many")
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise UserError(
            f"expected what a migration has found odd, found something else: {type(error).__name__}: {error}; remove "
            "the unfinished folder, and run the same command again"
        ) from None
    return parts


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
