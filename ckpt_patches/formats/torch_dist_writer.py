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
        described[tensor.name] = _tensor(tensor)
        for offsets in tensor.chunks:
            key = _described("MetadataIndex", fqn=tensor.name, offset=Size(offsets), index=None)
            stored[key] = _place(tensor.places[offsets])
    for name, place in objects.items():
        described[name] = _described("BytesStorageMetadata")
        stored[_described("MetadataIndex", fqn=name, index=None)] = _place(place)
    return pickled(_described("Metadata", state_dict_metadata=described, planner_data=None, storage_data=stored))


def _tensor(tensor: Tensor) -> Any:
    layout = stub("torch.serialization", "_get_layout")("torch.strided")
    memory_format = stub(METADATA, "_MEM_FORMAT_ENCODING")(0)
    state = stub("torch", tensor.dtype), layout, False, memory_format, False
    properties = _object(METADATA, "TensorProperties", state)
    chunks = [
        _described("ChunkStorageMetadata", offsets=Size(offsets), sizes=Size(sizes))
        for offsets, sizes in tensor.chunks.items()
    ]
    return _described("TensorStorageMetadata", properties=properties, size=Size(tensor.size), chunks=chunks)


def _place(place: Extent) -> Any:
    state = {"relative_path": place.path, "offset": place.offset, "length": place.nbytes}
    return _object(STORAGE, "_StorageInfo", state)


def _described(name: str, **fields: Any) -> Any:
    return _object(METADATA, name, fields or None)


def _object(module: str, name: str, state: Any) -> Any:
    kind = stub(module, name)
    made = kind.__new__(kind)
    made.state = state
    return made
