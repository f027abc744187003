"""Write a torch_dist checkpoint whose index has COUNT chunks of one tensor, and no file with their elements.

write_index_of_chunks OUT COUNT
"""

import json
import pickle
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

ROWS, NBYTES = 64, 1200  # per chunk: its elements, and the bytes that torch.save writes for it


def write(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    size, name = torch.Size([ROWS]), "decoder.weight"
    offsets = [torch.Size([ROWS * number]) for number in range(count)]
    chunks = [ChunkStorageMetadata(at, size) for at in offsets]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([ROWS * count]), chunks)
    places = {
        MetadataIndex(name, at): _StorageInfo(f"__{number % 8}_0.distcp", NBYTES * (number // 8), NBYTES)
        for number, at in enumerate(offsets)
    }
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({name: tensor}, storage_data=places)))
    torch.save({}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
