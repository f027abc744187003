"""Stage 1 and 2: the fragments of a parameter in the ranks' partitions, and a check that none is missing."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ckpt_patches.convert.output_files import Pieces, Run
from ckpt_patches.convert.rules import Rules
from ckpt_patches.errors import UserError
from ckpt_patches.formats.dtypes import ITEM_SIZE
from ckpt_patches.formats.zero import MASTER, ElementType, Flat, Partition, Shape
from ckpt_patches.formats.zero_checkpoint import Checkpoint
from ckpt_patches.runtime.shown import shown


class Fragment(NamedTuple):
    """A part of a parameter in a rank's partition of its group."""

    dp: int
    partition: Partition
    name: str  # in the rank's file
    start: int  # elements
    numel: int

    def place(self, key: str) -> tuple[Flat, int]:
        """The flat tensor of a state, and the fragment's offset in it, in elements."""
        return self.partition.place(self.name, key)


Held = dict[tuple[str, int], dict[int, list[Fragment]]]  # by (parameter, tensor-parallel rank), then by pipeline stage


def fragments_of(checkpoint: Checkpoint, known: Rules) -> Held:
    """The fragments of each pipeline stage, in the order of data-parallel ranks.

    For a parameter that the checkpoint declares equal in all stages: only those of the first stage.
    """
    found: Held = {}
    for rank in checkpoint.ranks:
        for partition in rank.partitions:
            for name, (start, numel) in partition.fragments.items():
                if rank.pp > 0 and known.is_replicated_in_pipeline(name):
                    continue
                of_stage = found.setdefault((name, rank.tp), {}).setdefault(rank.pp, [])
                of_stage.append(Fragment(rank.dp, partition, name, start, numel))
    return found


def check_fragments(
    checkpoint: Checkpoint,
    where: str,
    shape: Shape,
    fragments: Sequence[Fragment],
    strict: bool,
    ranks: Sequence[int] | None = None,
) -> None:
    """Check that fragments are the complete parameter, within their partitions, and consecutive from rank to rank.

    `ranks` are those that share the parameter; None: all.
    """
    for fragment in fragments:
        for key in fragment.partition.held() if fragment.numel else ():
            flat, start = fragment.place(key)
            if start + fragment.numel > flat.numel:
                raise UserError(
                    f"{checkpoint.files[flat.file].path}: the fragment of {where} ends at element "
                    f"{start + fragment.numel} of {key}, which has {flat.numel}"
                )
    numel = sum(fragment.numel for fragment in fragments)
    if numel != math.prod(shape):
        found = f"{fragments[0].dp} to {fragments[-1].dp}" if fragments else "none"
        raise UserError(
            f"{where}: expected {math.prod(shape)} elements, found {numel} in the fragments of data-parallel ranks "
            f"{found}: {'a fragment is missing' if numel < math.prod(shape) else 'fragments overlap'}"
        )
    held = [fragment for fragment in fragments if fragment.numel]
    for one, other in itertools.pairwise(held):
        ends = one.start + one.numel == one.partition.states[MASTER].numel
        gap = other.start or not ends or other.dp != _next(one.dp, ranks)
        if gap and strict:
            raise UserError(
                f"{where}: the fragments of data-parallel ranks {one.dp} and {other.dp} do not follow on one another "
                "(--no-strict converts nevertheless)"
            )


def _next(dp: int, ranks: Sequence[int] | None) -> int:
    """The next rank of `ranks` after `dp`, or of all ranks."""
    return dp + 1 if ranks is None else next((rank for rank in ranks if rank > dp), -1)


def pieces(fragments: Sequence[Fragment], key: str, kind: ElementType) -> Pieces:
    size = ITEM_SIZE[kind.dtype]
    places = [(*fragment.place(key), fragment.numel) for fragment in fragments if fragment.numel]
    return Pieces.of([Run(flat.file, flat.offset + start * size, numel * size) for flat, start, numel in places])


def states_of(checkpoint: Checkpoint, name: str, partitions: Sequence[Partition]) -> list[str]:
    """The states in all partitions that hold a part of a parameter, the main parameter first.

    Raises:
        UserError: a partition lacks a state that another one has.
    """
    if not partitions:  # without elements: the states that every parameter has
        every = [partition.held() for rank in checkpoint.ranks for partition in rank.partitions]
        return [key for key in next(iter(every), [MASTER]) if all(key in own for own in every)]
    keys = list(dict.fromkeys(key for partition in partitions for key in partition.held()))
    for partition in partitions:
        if absent := [key for key in keys if key not in partition.held()]:
            path = checkpoint.files[partition.states[MASTER].file].path
            raise UserError(f"{path}: expected {shown(absent[0])} of {name}, as other ranks have it, found none")
    return keys


def one_kind(checkpoint: Checkpoint, flats: Sequence[Flat]) -> ElementType:
    """The element type of these, merged. As with torch.cat, the result requires a gradient if one of them does."""
    dtype = flats[0].type.dtype
    for flat in flats:
        if flat.type.dtype != dtype:
            one, other = (checkpoint.files[f.file].path for f in (flats[0], flat))
            raise UserError(f"{one} has {dtype} where {other} has {flat.type.dtype}")
    return ElementType(dtype, any(flat.type.requires_grad for flat in flats))
