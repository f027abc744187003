"""Find misplaced rows of SwiGLU's W and V, saved with torch FSDP2, from the index of a torch_dist checkpoint. Pure.

A tensor-parallel rank's `linear_fc1` has its rows of W, then of V. Each of its data-parallel ranks has a shard of these
rows. megatron-core 0.10.0 to 0.18.2 halves each shard, and saves the halves as rows of W and of V. Rows are then in
wrong places ("mixed"), and a tensor has two chunks per shard. In a correct checkpoint a shard is one chunk, or two if
the fix `fsdp2_swiglu_rows` saved an odd number of shards.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from ckpt_patches.formats.torch_dist import Tensor

FC1, FC2 = "linear_fc1", "linear_fc2"


class Grid(NamedTuple):
    """The ranks that share a tensor."""

    tensor_parallel: int
    data_parallel: int

    @property
    def shards(self) -> int:
        return self.tensor_parallel * self.data_parallel

    def filed(self, half: int, tensor_parallel: int, piece: int) -> int:
        """The number of the chunk, in a tensor with mixed rows, with a piece of a tensor-parallel rank's W or V.

        W (`half` 0) and V (1) have one piece per data-parallel rank, in row order.
        """
        shard, half_of_shard = divmod(piece + half * self.data_parallel, 2)
        return half_of_shard * self.shards + tensor_parallel * self.data_parallel + shard


class Mixed(NamedTuple):
    """A tensor with rows that are, or can be, mixed."""

    grid: Grid | None  # None: unknown whether they are
    why_not: str = ""  # the reason if unknown


def rows_axis(name: str, axes: int) -> int:
    """The axis of the rows of W and V in a `linear_fc1`: the last one of a bias, else the last but one."""
    return axes - (1 if name.endswith("bias") else 2)


def mixed(tensors: Mapping[str, Tensor], *, is_fsdp2: bool) -> dict[str, Mixed]:
    """The tensors whose rows are mixed, and those for which this is unknown, by name.

    `is_fsdp2`: whether the checkpoint states that FSDP2 saved it. Otherwise a `linear_fc2` that is split along its rows
    shows it: up to 0.18 only FSDP2 splits it so.
    """
    found = {}
    for name, tensor in tensors.items():
        if re.search(rf"\b{FC1}\.(weight|bias)$", name) and tensor.whole is None:
            own = _mixed(tensor, _beside(name, tensors), is_fsdp2)
            if own is not None:
                found[name] = own
    return found


def _beside(name: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The weight of `linear_fc2` or the same state of it; the weight if it is frozen and has no states."""
    beside = re.sub("(weight|bias)$", "weight", name.replace(FC1, FC2))
    while "." in beside and beside not in tensors:
        beside = beside.partition(".")[2]
    return tensors.get(beside)


def _mixed(tensor: Tensor, beside: Tensor | None, is_fsdp2: bool) -> Mixed | None:
    """None if the rows are in place, or FSDP2 did not shard them."""
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
    if data_parallel % 2 == 0:  # if in place, a shard is one chunk
        return Mixed(grid)
    number = {row: count for count, row in enumerate(rows)}
    files = [(number[at[axis]], place.path.rpartition("_")[0]) for at, place in tensor.places.items()]
    as_mixed, in_place = (_is_of_one_rank(files, shard_of) for shard_of in (_mixed_shards(grid), _shards(grid)))
    if as_mixed == in_place:
        return Mixed(None, "the files do not tell which data-parallel rank has saved which of its chunks")
    return Mixed(grid) if as_mixed else None


def _mixed_shards(grid: Grid) -> dict[int, int]:
    """The shard of each chunk, by chunk number, if rows are mixed."""
    return {chunk: chunk % grid.shards for chunk in range(2 * grid.shards)}


def _shards(grid: Grid) -> dict[int, int]:
    """The same if rows are in place, and each shard has two chunks."""
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
