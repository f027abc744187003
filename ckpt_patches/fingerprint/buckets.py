"""Fingerprints of Megatron's buckets of many parameters. The run's record has the offset of each parameter.

The formats `dp_reshardable` and `fully_sharded_bucket_space` have a tensor per bucket and state.
`dp_zero_gather_scatter` has one per buffer and state: its buckets without their end padding.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_patches.fingerprint.element_hash import MODULUS, Box
from ckpt_patches.fingerprint.record import NotARecord
from ckpt_patches.fingerprint.states import Fingerprint
from ckpt_patches.formats.ranged import RangedFiles

if TYPE_CHECKING:
    from ckpt_patches.formats.checkpoint import Checkpoint, Shard, Stream

BUCKET = re.compile(r"(?P<chain>chained_\d+\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.(?P<rest>.*)")
OF_BUCKET = re.compile(r"gbuf_idx_(?P<buffer>\d+)\.dtype_.*\.bucket_idx_(?P<bucket>\d+)(?:\.(?P<state>\w+))?")
OF_BUFFER = re.compile(r"param_state(?:/shard_[\d.]+)?(?:_[\d.]+)?\.(?P<buffer>\d+)\..*")  # in an object


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


class Flat(NamedTuple):
    """All elements of one state of a bucket or a full buffer."""

    layout: str  # key
    bucket: int | None  # None for a full buffer
    state: str
    stream: "Stream"


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
    from ckpt_patches.fingerprint.files import of_elements  # needs NumPy only: a run needs torch, and no files

    sums: dict[tuple[str, str], tuple[int, int]] = {}
    with RangedFiles() as files:
        for flat in flats:
            for laid, begin in _in_array(known.get(flat.layout), flat.bucket):
                key = laid.parameter, flat.state
                end = min(begin + laid.box.numel, flat.stream.numel)
                if begin < end:
                    value = of_elements(files, flat.stream, begin, end, laid.box, 0)
                    before = sums.get(key, (0, 0))
                    sums[key] = before[0] + end - begin, (before[1] + value) % MODULUS
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


def flats(found: "Checkpoint") -> Iterator[Flat]:
    """The flat arrays of a distributed checkpoint: of tensors in chunks, or of objects."""
    for parameter, shards in _by_parameter(found).items():
        place = BUCKET.fullmatch(parameter)
        of_bucket, of_buffer = (kind.fullmatch(place["rest"]) if place else None for kind in (OF_BUCKET, OF_BUFFER))
        if place is None or (match := of_bucket or of_buffer) is None:
            continue
        chain = int(place["chain"][len("chained_") : -1]) if place["chain"] else None
        key = key_of(chain, int(place["group"]), int(match["buffer"]))
        if of_bucket:
            yield from _flats(shards, key, int(of_bucket["bucket"]), of_bucket["state"])
        else:
            yield from _flats(shards, key, None)


def _by_parameter(found: "Checkpoint") -> dict[str, list["Shard"]]:
    """The shards of each bucket or buffer."""
    by_name: dict[str, list[Shard]] = {}
    for shard in found.shards:
        if not shard.has_rows:
            by_name.setdefault(shard.parameter, []).append(shard)
    return dict(sorted(by_name.items()))


def _flats(shards: list["Shard"], key: str, bucket: int | None, state: str | None = None) -> Iterator[Flat]:
    """The arrays of a bucket or buffer, by state. The label of a chunk is its index, or its offset."""
    for role in sorted({role for shard in shards for role in shard.streams}):
        own = [shard for shard in shards if role in shard.streams]
        if len(own) > 1:
            own.sort(key=lambda shard: int(shard.label))
        extents = tuple(extent for shard in own for extent in shard.streams[role].extents)
        yield Flat(key, bucket, state or role, own[0].streams[role]._replace(extents=extents))
