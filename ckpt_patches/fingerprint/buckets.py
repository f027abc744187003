"""The places of parameters in Megatron's buckets of many parameters, which the record of a run has."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from ckpt_patches.fingerprint.element_hash import Box
from ckpt_patches.fingerprint.record import MOST, NotARecord, count


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

    def places(self, bucket: int | None) -> Iterator[tuple[int, Laid]]:
        """Where the parameters of a bucket begin in it; None: those of all buckets, in an array of the full buffer."""
        begins = list(accumulate(self.numels, initial=0))
        for own in self.laid:
            if bucket in (None, own.bucket):
                yield own.begin + (begins[own.bucket] if bucket is None else 0), own


def key_of(chain: int | None, group: int, buffer: int) -> str:
    """The key of a layout: the optimizer's index in a chain (None: no chain), the data-parallel group, the buffer."""
    return f"{'' if chain is None else f'chained_{chain}.'}dp_group_idx_{group}.gbuf_idx_{buffer}"


def layouts(plain: Mapping[str, Any]) -> dict[str, Layout]:
    """The layouts by key, from results of `Layout.as_plain`.

    Raises:
        NotARecord: the value has another form.
    """
    try:
        return {key: _layout(tuple(map(count, numels)), laid) for key, (numels, laid) in plain.items()}
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise NotARecord(f"expected the layout of buckets ({error!r})") from None


def _layout(numels: tuple[int, ...], plain: Any) -> Layout:
    laid = tuple(map(_laid, plain))
    if any(own.bucket >= len(numels) for own in laid):
        raise ValueError(f"a place in a bucket that is none of {len(numels)}")
    return Layout(numels, laid)


def _laid(plain: Any) -> Laid:
    bucket, begin, parameter, *box = plain
    offsets, size, shape = (tuple(map(count, axes)) for axes in box)
    ends = [at + numel for at, numel in zip(offsets, size, strict=True)]
    if math.prod(shape) >= MOST or any(end > axis for end, axis in zip(ends, shape, strict=True)):
        raise ValueError(f"a box of {size} at {offsets} in {shape}")
    return Laid(count(bucket), count(begin), str(parameter), Box(offsets, size, shape))
