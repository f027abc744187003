"""The odd elements of an output file, as JSON. Decoding runs no code."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ckpt_patches.audit.judging.scan import Odd, OddRuns, Part, Tally
from ckpt_patches.errors import UserError
from ckpt_patches.formats.elements import PartRead

COLUMNS = ("int64", "int64", "uint16")  # dtypes of odd runs: begin, end, code


def encoded(parts: Sequence[Part]) -> bytes:
    return json.dumps([_described(part) for part in parts]).encode()


def _described(part: Part) -> dict[str, Any]:
    return {
        "shard": part.shard,
        "runs": [column.tolist() for column in part.odd.runs],
        "is_cut": part.odd.is_cut,
        "tallies": [[bit, *tally] for bit, tally in part.odd.tallies.items()],
        "pieces": part.pieces,
    }


def decoded(data: bytes) -> list[Part]:
    """The parts that were passed to `encoded`.

    Raises:
        UserError: the data is something else.
    """
    try:
        return [_part(described) for described in json.loads(data)]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(
            f"expected what a migration has found odd, found something else: {type(error).__name__}: {error}; remove "
            "the unfinished folder, and run the same command again"
        ) from None


def _part(described: dict[str, Any]) -> Part:
    runs = OddRuns(*(np.array(column, dtype) for column, dtype in zip(described["runs"], COLUMNS, strict=True)))
    tallies = {bit: Tally(*own) for bit, *own in described["tallies"]}
    pieces = [PartRead(*piece) for piece in described["pieces"]]
    return Part(int(described["shard"]), Odd(runs, bool(described["is_cut"]), tallies), pieces)
