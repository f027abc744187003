"""Judge every tensor in the files, or report it as not judged.

A reader creates shards from the arrays that it knows: main parameters with their moments and weights. All other tensors
(buffers, frozen weights, states of unknown optimizers) are only checked for NaN and infinity.
"""

from pathlib import Path

from ckpt_patches.audit.ranges import FileRanges
from ckpt_patches.formats import damages, tensor_streams
from ckpt_patches.formats.checkpoint import WEIGHT, Checkpoint, Extent, Held, Shard, Stream
from ckpt_patches.formats.damages import Finding


def others(found: Checkpoint) -> list[Shard]:
    """Shards for tensors that no shard reads. Adds a finding for each of these that cannot be judged."""
    by_readers = FileRanges([*(extent for shard in found.shards for extent in shard.extents), *found.padded])
    named = {finding.array for finding in found.findings if finding.kind is damages.NOT_READ}
    left = [
        held
        for held in found.tensors
        if held.header.numel
        and held.name not in named
        and tensor_streams.is_read(found, held.name, held.header.dtype)
        and not by_readers.meet(_extent(held))
    ]
    shards: dict[Extent, Shard] = {}
    for held in (held for held in left if held.header.is_contiguous):
        name = held.name or str(Path(held.path).relative_to(found.path))  # the file holds only a tensor
        stream = Stream(name, held.header.dtype, (_extent(held),))
        shards.setdefault(_extent(held), Shard(name, "", held.header.shape, {WEIGHT: stream}))
    contiguous = FileRanges(shards)
    for held in (held for held in left if not held.header.is_contiguous and not contiguous.cover(_extent(held))):
        stream = Stream(held.name, held.header.dtype, (_extent(held),))
        if contiguous.meet(_extent(held)):
            detail = "its elements do not lie in order, and share their storage with other tensors"
            found.findings.append(Finding(damages.NOT_JUDGED, held.name, detail=detail))
        else:
            shards.setdefault(_extent(held), Shard(held.name, "", (stream.numel,), {WEIGHT: stream}))
    return list(shards.values())


def _extent(held: Held) -> Extent:
    """The bytes of a tensor; for a non-contiguous one, its full storage."""
    header = held.header
    if header.is_contiguous:
        return Extent(held.path, header.offset, header.nbytes)
    return Extent(held.path, header.storage.offset, header.storage.nbytes)
