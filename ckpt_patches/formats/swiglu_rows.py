"""Where torch FSDP2 has filed the rows of SwiGLU's W and V, by the index of a torch_dist checkpoint. Pure.

A tensor-parallel rank's `linear_fc1` is its rows of W, then those of V, and its data-parallel ranks have a shard of
these rows each. megatron-core 0.10.0 to 0.18.2 halves each shard, and files the halves as rows of W and of V: rows are
in each other's places, and a tensor has two chunks for each shard. In their places a shard's rows are one chunk, or, as
the fix `fsdp2_swiglu_rows` saves an odd number of shards, two.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from ckpt_patches.formats.torch_dist import Tensor

FC1, FC2 = "linear_fc1", "linear_fc2"


class Grid(NamedTuple):
    """The ranks that have cut a tensor."""

    tensor_parallel: int
    data_parallel: int

    @property
    def shards(self) -> int:
        return self.tensor_parallel * self.data_parallel

    def filed(self, half: int, tensor_parallel: int, piece: int) -> int:
        """Of a tensor with mixed rows the chunk, by its number, with a piece of a tensor-parallel rank's W or V.

        Both have as many pieces as there are data-parallel ranks, in the order of their rows.
        """
        shard, half_of_shard = divmod(piece + half * self.data_parallel, 2)
        return half_of_shard * self.shards + tensor_parallel * self.data_parallel + shard


class Mixed(NamedTuple):
    """A tensor whose rows are mixed, or can be."""

    grid: Grid | None  # none: it cannot be told
    why_not: str = ""  # it cannot be told


def rows_axis(name: str, axes: int) -> int:
    """Along which axis a `linear_fc1` has the rows of W and V: a bias has no other, and layers are in front."""
    return axes - (1 if name.endswith("bias") else 2)


def mixed(tensors: Mapping[str, Tensor], *, is_fsdp2: bool) -> dict[str, Mixed]:
    """The tensors whose rows are mixed, and those of which it cannot be told, by name.

    `is_fsdp2`: whether the checkpoint states that FSDP2 has saved it. Without that a `linear_fc2` cut along its rows
    says so, which nothing else cuts up to 0.18.
    """
    found = {}
    for name, tensor in tensors.items():
        if re.search(rf"\b{FC1}\.(weight|bias)$", name) and tensor.whole is None:
            own = _mixed(tensor, _beside(name, tensors), is_fsdp2)
            if own is not None:
                found[name] = own
    return found


def _beside(name: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The weight of `linear_fc2`, or a state of it; where it is frozen it has no states."""
    beside = re.sub("(weight|bias)$", "weight", name.replace(FC1, FC2))
    while "." in beside and beside not in tensors:
        beside = beside.partition(".")[2]
    return tensors.get(beside)


def _mixed(tensor: Tensor, beside: Tensor | None, is_fsdp2: bool) -> Mixed | None:
    """None: its rows are in place, or FSDP2 has not cut them."""
    axis = rows_axis(tensor.name, len(tensor.size))
    rows = sorted({at[axis] for at in tensor.chunks})
    if len(rows) % 2 or len(rows) == 2 or axis < 0:
        return None
    if beside is None:
        why_not = f"no {FC2} is beside it, of which each data-parallel rank has a chunk"
        return Mixed(None, f"{len(rows)} chunks of rows, and {why_not}") if is_fsdp2 else None
    if beside.whole is not None or len(beside.size) < 2 or tensor.size[axis] != 2 * beside.size[-1]:
        return None
    data_parallel, tensor_parallel = (len({at[other] for at in beside.chunks}) for other in (-2, -1))
    grid = Grid(tensor_parallel, data_parallel)
    if data_parallel == 1 or len(rows) != 2 * grid.shards:
        return None
    if data_parallel % 2 == 0:  # in its place a shard is one chunk
        return Mixed(grid)
    number = {row: count for count, row in enumerate(rows)}
    files = [(number[at[axis]], place.file.rpartition("_")[0]) for at, place in tensor.places.items()]
    as_mixed, in_place = (_is_of_one_rank(files, shard_of) for shard_of in (_mixed_shards(grid), _shards(grid)))
    if as_mixed == in_place:
        return Mixed(None, "the files do not tell which data-parallel rank has saved which of its chunks")
    return Mixed(grid) if as_mixed else None


def _mixed_shards(grid: Grid) -> dict[int, int]:
    """By the number of a chunk whose it is."""
    return {chunk: chunk % grid.shards for chunk in range(2 * grid.shards)}


def _shards(grid: Grid) -> dict[int, int]:
    """The same where two chunks of each shard are in place."""
    found = {}
    for half in range(2):
        for rank in range(grid.tensor_parallel):
            for piece in range(grid.data_parallel):
                chunk = (half * grid.tensor_parallel + rank) * grid.data_parallel + piece
                found[chunk] = rank * grid.data_parallel + (piece + half * grid.data_parallel) // 2
    return found


def _is_of_one_rank(files: list[tuple[int, str]], shard_of: dict[int, int]) -> bool:
    """Whether all chunks of each shard are in files of one rank."""
    ranks: dict[int, set[str]] = {}
    for chunk, rank in files:
        ranks.setdefault(shard_of[chunk], set()).add(rank)
    return all(len(own) == 1 for own in ranks.values())
