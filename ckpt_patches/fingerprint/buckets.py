"""Fingerprints of Megatron's buckets of many parameters. The run's record has the offset of each parameter.

The formats `dp_reshardable` and `fully_sharded_bucket_space` have a tensor per bucket and state. `torch` and
`dp_zero_gather_scatter` have one per buffer and state: its buckets without their end padding.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_patches.fingerprint.boxes import Box, of_box
from ckpt_patches.fingerprint.element_hash import MODULUS
from ckpt_patches.fingerprint.record import NotARecord
from ckpt_patches.fingerprint.states import Fingerprint, bits_of, blocks, state_named
from ckpt_patches.formats import megatron_torch, torch_dist, torch_file, zarr
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.ranged import RangedFiles

BUCKET = re.compile(r"^(?P<chain>chained_\d+\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.(?P<rest>.*)$")
OF_BUCKET = re.compile(r"^gbuf_idx_(?P<buffer>\d+)\.dtype_.*\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)$")
OWN_GROUP = 0  # in the `torch` format, with one file per model-parallel rank


class Laid(NamedTuple):
    """A parameter, or a box of it, in a bucket: its elements are contiguous there, in C order."""

    bucket: int
    begin: int  # index in the bucket
    parameter: str
    box: Box


@dataclass(frozen=True)
class Layout:
    """The layout of one buffer of a model-parallel rank."""

    numels: tuple[int, ...]  # of its buckets, without end padding
    laid: tuple[Laid, ...]

    def as_plain(self) -> list[Any]:
        """The form for a record."""
        return [list(self.numels), [[own.bucket, own.begin, own.parameter, *map(list, own.box)] for own in self.laid]]


class Segment(NamedTuple):
    """Elements of a flat array that are contiguous in a file."""

    first: int  # index in the array
    numel: int
    path: Path
    offset: int  # bytes
    dtype: str


class Flat(NamedTuple):
    """All elements of one state of a bucket or a full buffer."""

    layout: str  # key
    bucket: int | None  # None for a full buffer
    state: str
    segments: list[Segment]


def key_of(chain: int | None, group: int, buffer: int) -> str:
    """The key of a layout: the optimizer's index in a chain (None: no chain), the data-parallel group, the buffer."""
    return f"{'' if chain is None else f'chained_{chain}.'}dp_group_idx_{group}.gbuf_idx_{buffer}"


def layouts(plain: Mapping[str, Any]) -> dict[str, Layout]:
    """The layouts by key, from results of `Layout.as_plain`.

    Raises:
        NotARecord: the value has another form.
    """
    try:
        return {
            key: Layout(tuple(numels), tuple(Laid(b, at, name, Box(*map(tuple, box))) for b, at, name, *box in laid))
            for key, (numels, laid) in plain.items()
        }
    except (TypeError, ValueError, AttributeError) as error:
        raise NotARecord(f"expected the layout of buckets ({error!r})") from None


def fingerprints(known: Mapping[str, Layout], flats: Iterable[Flat]) -> Iterator[Fingerprint]:
    """The fingerprints of the parameters with known offsets, summed over all buckets.

    Raises:
        UserError: a file cannot be read.
    """
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    with RangedFiles() as files:
        for flat in flats:
            for laid, begin in _in_array(known.get(flat.layout), flat.bucket):
                key = laid.parameter, state_named(flat.state)
                numel, value = _of_laid(files, laid, begin, flat.segments)
                before = sums.get(key, (0, 0))
                sums[key] = before[0] + numel, (before[1] + value) % MODULUS
    for key, (numel, value) in sorted(sums.items()):
        yield Fingerprint(*key, numel, value)


def _in_array(layout: Layout | None, bucket: int | None) -> Iterator[tuple[Laid, int]]:
    """The parameters in a flat array, and their offsets there."""
    if layout is None:
        return
    begins = list(accumulate(layout.numels, initial=0))
    for laid in layout.laid:
        if bucket is None:
            yield laid, begins[laid.bucket] + laid.begin
        elif laid.bucket == bucket:
            yield laid, laid.begin


def _of_laid(files: RangedFiles, laid: Laid, begin: int, segments: list[Segment]) -> tuple[int, int]:
    """The number of a parameter's elements in the segments, and their sum."""
    found, numel, end = 0, 0, begin + laid.box.numel
    for segment in segments:
        first, last = max(begin, segment.first), min(end, segment.first + segment.numel)
        if first >= last:
            continue
        size, at = item_size(segment.dtype), first
        for block in blocks(
            files, segment.path, segment.offset + (first - segment.first) * size, (last - first) * size
        ):
            bits = bits_of(block, segment.dtype)
            found += of_box(bits, at - begin, laid.box)
            at += len(bits)
        numel += last - first
    return numel, found


# Locations in the formats


def in_distributed(path: Path, stored: Mapping[str, torch_dist.Tensor | zarr.Array]) -> Iterator[Flat]:
    """The flat arrays of a distributed checkpoint.

    Raises:
        UserError: it cannot be read.
    """
    for name, tensor in sorted(stored.items()):
        place = BUCKET.match(name)
        bucket = OF_BUCKET.match(place["rest"]) if place else None
        if place and bucket and len(tensor.shape if isinstance(tensor, zarr.Array) else tensor.size) == 1:
            key = _layout_key(place, int(bucket["buffer"]))
            yield Flat(key, int(bucket["bucket"]), bucket["state"], list(_segments(path, tensor)))
    for name, file in _objects(path):
        place = BUCKET.match(name)
        if place and place["rest"].startswith("param_state"):
            value = file.value[0] if isinstance(file.value, list) and len(file.value) == 1 else file.value
            yield from _of_buffers(file.path, value, partial(_layout_key, place))


def in_torch(folder: Path, value: Any) -> Iterator[Flat]:
    """The flat arrays of one optimizer of a model-parallel rank, from the `torch` format's file."""
    return _of_buffers(folder / megatron_torch.OPTIMIZER, value, partial(key_of, None, OWN_GROUP))


def _layout_key(place: re.Match[str], buffer: int) -> str:
    chain = place["chain"]
    return key_of(int(chain[len("chained_") : -1]) if chain else None, int(place["group"]), buffer)


def _of_buffers(path: Path, value: Any, key: Callable[[int], str]) -> Iterator[Flat]:
    for where, states in megatron_torch.buckets(value).items():
        buffer = where.partition(".")[0]
        for state, tensor in states.items():
            if buffer.isdecimal() and tensor.is_known and tensor.is_contiguous:
                yield Flat(key(int(buffer)), None, state, [Segment(0, tensor.numel, path, tensor.offset, tensor.dtype)])


def _segments(path: Path, tensor: torch_dist.Tensor | zarr.Array) -> Iterator[Segment]:
    if isinstance(tensor, zarr.Array):
        for offsets, label in tensor.places():
            yield Segment(offsets[0], tensor.chunks[0], tensor.path / label, 0, tensor.dtype)
        return
    with RangedFiles() as files:
        for offsets, place in tensor.places.items():
            header = torch_dist.read_chunk(files, path, tensor, offsets).value
            yield Segment(offsets[0], header.numel, path / place.path, header.offset, tensor.dtype)


def _objects(path: Path) -> Iterator[tuple[str, torch_file.TorchFile]]:
    """The files that can contain buckets, with their names."""
    if (path / torch_dist.INDEX).exists():
        with RangedFiles() as files:
            for name, place in torch_dist.read_index(path).objects.items():
                if BUCKET.match(name):
                    yield name, torch_dist.read_place(files, path, place)
        return
    for folder in sorted(path.glob("*optimizer.distributed.*param_state")):
        for file in sorted(folder.glob("shard_*.pt")):
            yield folder.name, torch_file.read(file, trust=True)  # runs no code
