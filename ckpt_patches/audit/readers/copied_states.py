"""Detect states of a parameter that are bit-for-bit copies: one of them was overwritten with the other."""

from collections.abc import Iterable, Iterator
from itertools import combinations

import numpy as np

from ckpt_patches.audit import damages
from ckpt_patches.audit.damages import Finding
from ckpt_patches.audit.judging.blocks import as_float32
from ckpt_patches.audit.readers.checkpoint import EXP_AVG, EXP_AVG_SQ, MASTER, Checkpoint, Extent, Shard, Stream
from ckpt_patches.formats.checksum import of_zeros
from ckpt_patches.formats.ranged import RangedFiles

STATES = (MASTER, EXP_AVG, EXP_AVG_SQ)
LEAST = 2  # elements; a single element can be equal by chance
NUMBERS = ("float64", "float32", "bfloat16", "float16")  # not 8-bit codes, which are all the same where a state is zero
PIECE = 1 << 16  # bytes compared at a time
Checksums = dict[tuple[str, int, int], int]


def findings(found: Checkpoint) -> Iterator[Finding]:
    """A finding for each pair of states of a shard that are equal and not all zeros."""
    checksums = {(record.path, record.offset, record.nbytes): record.crc for record in found.records}
    with RangedFiles() as files:
        for shard in found.shards:
            for one, other in _same(shard, checksums, files):
                if not shard.has_rows and not _has_numbers(shard.streams[one], files):
                    continue  # a bucket's padding: uninitialized memory, which can be the same twice
                detail = f"it is the same as {shard.streams[one].array}, bit for bit: one is a copy"
                yield Finding(damages.FOREIGN_FILE, shard.streams[other].array, shard.label, detail=detail)


def _same(shard: Shard, checksums: Checksums, files: RangedFiles) -> Iterator[tuple[str, str]]:
    if shard.numel < LEAST or shard.is_padding:
        return
    for one, other in combinations([role for role in STATES if role in shard.streams], 2):
        first, second = shard.streams[one], shard.streams[other]
        is_number = first.dtype == second.dtype and first.dtype in NUMBERS
        if is_number and _are_same(first.extents, second.extents, checksums, files):
            yield one, other


def _are_same(one: Iterable[Extent], other: Iterable[Extent], checksums: Checksums, files: RangedFiles) -> bool:
    """Whether two states are equal and not all zeros. Compares stored checksums if available, otherwise bytes."""
    pairs = list(zip(one, other, strict=False))
    if any(first.nbytes != second.nbytes for first, second in pairs):
        return False
    known = [[checksums.get((extent.path, extent.offset, extent.nbytes)) for extent in pair] for pair in pairs]
    if all(crc is not None for pair in known for crc in pair):
        zeros = all(crc == of_zeros(first.nbytes) for (first, _), (crc, _) in zip(pairs, known, strict=True))
        return not zeros and all(first == second for first, second in known)
    try:
        return _same_bytes(pairs, files)
    except OSError:  # reported when the shard is judged
        return False


def _same_bytes(pairs: Iterable[tuple[Extent, Extent]], files: RangedFiles) -> bool:
    is_zero = True
    for first, second in pairs:
        for at in range(0, first.nbytes, PIECE):
            own, other = (_bytes(extent, at, files) for extent in (first, second))
            if own != other:
                return False
            is_zero = is_zero and not any(own)
    return not is_zero


def _has_numbers(stream: Stream, files: RangedFiles) -> bool:
    """Whether any element is neither zero nor denormal. If not, it may be uninitialized memory."""
    for extent in stream.extents:
        for at in range(0, extent.nbytes, PIECE):
            values = as_float32(np.frombuffer(_bytes(extent, at, files), np.uint8), stream.dtype)
            if values is None or bool((np.abs(values) >= np.finfo(np.float32).tiny).any()):
                return True
    return False


def _bytes(extent: Extent, at: int, files: RangedFiles) -> bytes:
    piece = bytearray(min(PIECE, extent.nbytes - at))
    files.read(extent.path, extent.offset + at, memoryview(piece))
    return bytes(piece)
