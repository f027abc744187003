"""Each rank's parts of frozen parameters in ZeRO-3 model files. A conversion copies these files."""

from collections.abc import Mapping

from ckpt_patches.formats import tensor_streams, zero
from ckpt_patches.formats.checkpoint import WEIGHT, Checkpoint, Extent, Shard, Stream
from ckpt_patches.formats.dtypes import ITEM_SIZE
from ckpt_patches.formats.torch_file import TensorHeader
from ckpt_patches.formats.zero_inventory import ModelFacts


def add(found: Checkpoint, model: ModelFacts, rank: int, ranks: int | None) -> None:
    """Add a shard for each part that `rank` of `ranks` holds, without the padding at its end.

    DeepSpeed allocates the padding with torch.empty, so it can hold NaN.
    """
    path = found.path / model.name
    shapes, fragments = model.value.get("frozen_param_shapes"), model.value.get("frozen_param_fragments")
    if not isinstance(shapes, Mapping) or not isinstance(fragments, Mapping) or not ranks:
        return
    for name, share in zero.shares(shapes, ranks):
        part = fragments.get(name)
        # MiCS shards a parameter over fewer ranks: then all elements are checked, as in an unknown tensor.
        if not isinstance(part, TensorHeader) or part.numel != share.each:
            continue
        own = share.of(rank)
        array = f"frozen_param_fragments.{name}"
        stream = tensor_streams.stream(found, path, array, part)
        if stream is None:
            continue
        found.padded.append(stream.extents[0])
        if own:
            extent = Extent(str(path), part.offset, own * ITEM_SIZE[part.dtype])
            streams = {WEIGHT: Stream(array, part.dtype, (extent,))}
            found.shards.append(Shard(array, path.name, (own,), streams))
