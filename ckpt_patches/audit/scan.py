"""Read every byte of a checkpoint once, in blocks, by two workers, and keep only where elements are odd."""

import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_patches.audit import blocks
from ckpt_patches.audit.checkpoint import Extent, Shard, Stream

BLOCK = 64 * 1024  # elements; a block of four arrays lies in the second-level cache
SPAN = 128 * BLOCK  # elements that a worker takes at a time
QUICK_SPAN = 1024 * BLOCK  # fewer in all are not worth a second process
MAX_RUNS = 100_000  # kept of a span, the longest ones, so that memory is bounded whatever the checkpoint holds
ITEM_SIZE = {"float64": 8, "float32": 4, "int64": 8, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


class Runs(NamedTuple):
    """Neighbouring elements with the same odd code, in order."""

    begin: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    code: npt.NDArray[np.uint16]

    @property
    def length(self) -> npt.NDArray[np.int64]:
        return self.end - self.begin


class Span(NamedTuple):
    """A part of a shard, for one worker."""

    shard: int  # its number
    streams: dict[str, Stream]
    begin: int  # elements
    end: int


def item_size(dtype: str) -> int:
    """Bytes of an element; one for what is not listed."""
    return ITEM_SIZE.get(dtype, 1)


def scan(shards: list[Shard], workers: int, progress: Callable[[int], None]) -> list[Runs]:
    """The odd runs of every shard. `progress` is told how many bytes more have been read."""
    found: list[list[Runs]] = [[] for _ in shards]
    spans = list(_spans(shards))
    for span, runs in _look_at_all(spans, workers):
        found[span.shard].append(runs)
        progress(sum((span.end - span.begin) * item_size(s.dtype) for s in span.streams.values()))
    return [joined(parts) for parts in found]


def _spans(shards: list[Shard]) -> Iterator[Span]:
    for number, shard in enumerate(shards):
        if shard.streams:
            for begin in range(0, shard.numel, SPAN):
                yield Span(number, shard.streams, begin, min(begin + SPAN, shard.numel))


def _look_at_all(spans: list[Span], workers: int) -> Iterator[tuple[Span, Runs]]:
    """In order."""
    if workers < 2 or sum(span.end - span.begin for span in spans) < QUICK_SPAN:
        yield from zip(spans, map(look, spans), strict=True)
        return
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        # In portions: a checkpoint of terabytes has more spans than should wait in a queue.
        for first in range(0, len(spans), 1024):
            portion = spans[first : first + 1024]
            yield from zip(portion, pool.map(look, portion), strict=True)


def look(span: Span) -> Runs:
    """Read a span, and find its odd runs."""
    parts, numel = [], span.end - span.begin
    buffers = {role: np.empty(min(BLOCK, numel) * item_size(s.dtype), np.uint8) for role, s in span.streams.items()}
    for begin in range(span.begin, span.end, BLOCK):
        end = min(begin + BLOCK, span.end)
        block: Mapping[str, tuple[blocks.Block, str]] = {
            role: (_read(stream, begin, end, buffers[role]), stream.dtype) for role, stream in span.streams.items()
        }
        if not blocks.is_clean(block):
            parts.append(runs_of(blocks.codes(block, end - begin), begin))
    return _longest(joined(parts))


def _read(stream: Stream, begin: int, end: int, buffer: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Elements `begin` to `end` of a stream, in the buffer."""
    first, last = begin * item_size(stream.dtype), end * item_size(stream.dtype)
    at = 0  # bytes of the stream before this extent
    for extent in stream.extents:
        low, high = max(first, at), min(last, at + extent.nbytes)
        if low < high:
            _read_extent(extent, low - at, memoryview(buffer)[low - first : high - first])
        at += extent.nbytes
    return buffer[: last - first]


def _read_extent(extent: Extent, offset: int, into: memoryview) -> None:
    file, done = _open(extent.path), 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], extent.offset + offset + done)
        if count == 0:
            raise OSError(f"{extent.path} became shorter while it was read")
        done += count


class _File:
    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.number)


@lru_cache(maxsize=64)
def _opened(path: str) -> _File:
    return _File(path)


def _open(path: str) -> int:
    return _opened(path).number


def runs_of(code: blocks.Codes, begin: int) -> Runs:
    """The odd runs of a block that begins at an element."""
    edges = np.flatnonzero(np.diff(code)) + 1
    starts = np.concatenate([[0], edges]).astype(np.int64)
    ends = np.concatenate([edges, [len(code)]]).astype(np.int64)
    own = code[starts]
    odd = own != 0
    return Runs(starts[odd] + begin, ends[odd] + begin, own[odd])


def joined(parts: list[Runs]) -> Runs:
    """All parts, which are in order; runs that go on in the next part are made one."""
    if not parts:
        return Runs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint16))
    begin, end, code = (np.concatenate(column) for column in zip(*parts, strict=True))
    cut = (begin[1:] != end[:-1]) | (code[1:] != code[:-1])
    any_run = np.full(min(len(begin), 1), True)
    first, last = np.concatenate([any_run, cut]), np.concatenate([cut, any_run])
    return Runs(begin[first], end[last], code[first])


def _longest(runs: Runs) -> Runs:
    """At most so many as are kept."""
    if len(runs.begin) <= MAX_RUNS:
        return runs
    kept = np.sort(np.argpartition(-runs.length, MAX_RUNS)[:MAX_RUNS])
    return Runs(*(column[kept] for column in runs))


def rows_of(shape: tuple[int, ...]) -> int:
    """Elements in a row: what one token of an embedding, or one unit of a layer, has. One in a vector."""
    return math.prod(shape[-1:]) if len(shape) > 1 else 1
