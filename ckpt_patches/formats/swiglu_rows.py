"""Find misplaced rows of SwiGLU's W and V, saved with torch FSDP2, from the index of a torch_dist checkpoint. Pure.

A tensor-parallel rank's `linear_fc1` has its rows of W, then of V. Each of its data-parallel ranks has a shard of these
rows. megatron-core 0.10.0 to 0.18.2 halves each shard, and saves the halves as rows of W and of V. Rows are then in
wrong places ("mixed"), and a tensor has two chunks per shard. In a correct checkpoint a shard is one chunk, or two if
the fix `fsdp2_swiglu_rows` saved an odd number of shards.
"""

import re
from collections.abc import Iterator, Mapping

from ckpt_patches.formats.damages import MIXED_ROWS, NOT_JUDGED, Finding
from ckpt_patches.formats.torch_dist import Tensor

FC1, FC2 = "linear_fc1", "linear_fc2"


def findings(tensors: Mapping[str, Tensor], is_fsdp2: bool | None) -> Iterator[Finding]:
    """The tensors whose rows are mixed, and those for which this is unknown.

    `is_fsdp2`: whether FSDP2 saved the checkpoint; None if the files do not state it. Then a `linear_fc2` that is split
    along its rows shows it: up to 0.18 only FSDP2 splits it so.
    """
    for name, tensor in tensors.items() if is_fsdp2 is not False else ():
        if re.search(rf"\b{FC1}\.(weight|bias)$", name) and tensor.whole is None:
            found = _mixed(tensor, _beside(name, tensors), bool(is_fsdp2))
            yield from () if found is None else (found,)


def _beside(name: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The weight of `linear_fc2` or the same state of it; the weight if it is frozen and has no states."""
    beside = re.sub("(weight|bias)$", "weight", name.replace(FC1, FC2))
    while "." in beside and beside not in tensors:
        beside = beside.partition(".")[2]
    return tensors.get(beside)


def _mixed(tensor: Tensor, beside: Tensor | None, is_fsdp2: bool) -> Finding | None:
    """None if the rows are in place, or FSDP2 did not shard them."""
    name = tensor.name
    axis = len(tensor.size) - (1 if name.endswith("bias") else 2)  # of the rows
    rows = sorted({at[axis] for at in tensor.chunks})
    if len(rows) % 2 or len(rows) == 2 or axis < 0:
        return None
    unknown = "whether rows of W and V are in each other's places, as torch FSDP2 has saved them"
    if beside is None:
        why_not = f"{len(rows)} chunks of rows, and no {FC2} is beside it, of which each data-parallel rank has a chunk"
        return Finding(NOT_JUDGED, name, f"{unknown}: {why_not}") if is_fsdp2 else None
    if beside.whole is not None or len(beside.size) < 2 or tensor.size[axis] != 2 * beside.size[-1]:
        return None
    data_parallel, tensor_parallel = (len({at[other] for at in beside.chunks}) for other in (-2, -1))
    if data_parallel == 1 or len(rows) != 2 * tensor_parallel * data_parallel:
        return None
    ranks = f"{tensor_parallel} tensor-parallel and {data_parallel} data-parallel ranks"
    if data_parallel % 2:  # with an even number, a shard whose rows are in place is one chunk
        # If rows are in place, the first shard has the chunks 0 and 1; if they are mixed, 0 and the one half-way.
        owners: dict[int, set[str]] = {row: set() for row in (rows[0], rows[1], rows[len(rows) // 2])}
        for at, place in tensor.places.items():
            if at[axis] in owners:
                owners[at[axis]].add(place.path.rpartition("_")[0])
        first, second, halfway = owners.values()
        if len(first) != 1 or (first == second) == (first == halfway):
            why_not = "the files do not tell which data-parallel rank has saved which of its chunks"
            return Finding(NOT_JUDGED, name, f"{unknown}: {why_not}")
        if first == second:
            return None
    return Finding(MIXED_ROWS, name, f"saved by {ranks}")
