"""Write an index of torch.distributed.checkpoint in the basic form that every release of Megatron reads.

https://pytorch.org/docs/stable/distributed.checkpoint.html
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_patches.formats.checkpoint import Extent
from ckpt_patches.formats.pickles import Size, stub
from ckpt_patches.formats.torch_dist import Tensor
from ckpt_patches.formats.torch_writer import pickled

METADATA, STORAGE = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
ARCHIVE = "archive"  # torch's folder of records for data that is not saved to a named file


def index(tensors: Iterable[Tensor], objects: Mapping[str, Extent]) -> bytes:
    """The bytes of `.metadata`. Every chunk of the tensors must have a place."""
    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for tensor in tensors:
        chunks = [
            _object("ChunkStorageMetadata", {"offsets": Size(offsets), "sizes": Size(sizes)})
            for offsets, sizes in tensor.chunks.items()
        ]
        own = {"properties": _properties(tensor.dtype), "size": Size(tensor.size), "chunks": chunks}
        described[tensor.name] = _object("TensorStorageMetadata", own)
        for offsets in tensor.chunks:
            key = _object("MetadataIndex", {"fqn": tensor.name, "offset": Size(offsets), "index": None})
            stored[key] = _place(tensor.places[offsets])
    for name, place in objects.items():
        described[name] = _object("BytesStorageMetadata", None)
        stored[_object("MetadataIndex", {"fqn": name, "index": None})] = _place(place)
    content = {"state_dict_metadata": described, "planner_data": None, "storage_data": stored}
    return pickled(_object("Metadata", content))


def _properties(dtype: str) -> Any:
    layout = stub("torch.serialization", "_get_layout")("torch.strided")
    memory_format = stub(METADATA, "_MEM_FORMAT_ENCODING")(0)
    return _object("TensorProperties", (stub("torch", dtype), layout, False, memory_format, False))


def _place(place: Extent) -> Any:
    state = {"relative_path": place.path, "offset": place.offset, "length": place.nbytes}
    return _object("_StorageInfo", state, STORAGE)


def _object(name: str, state: Any, module: str = METADATA) -> Any:
    kind = stub(module, name)
    made = kind.__new__(kind)
    made.state = state
    return made
