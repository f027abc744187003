"""Load every tensor of a torch_dist checkpoint with torch: load_distcp.py CHECKPOINT"""

import sys

import torch
from torch.distributed.checkpoint import FileSystemReader, load

reader = FileSystemReader(sys.argv[1])
tensors = {
    name: torch.empty(entry.size, dtype=entry.properties.dtype)
    for name, entry in reader.read_metadata().state_dict_metadata.items()
    if hasattr(entry, "size")
}
load(tensors, storage_reader=reader)
assert len(tensors) > 5
assert all(tensor.isfinite().all() for tensor in tensors.values())
