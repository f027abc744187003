"""Save with `dcp.async_save` on one rank, and step before it writes.

dcp_async_save.py id|writer FOLDER [KIND ...]     prints the kinds of tensors whose saved values are of the step
dcp_async_save.py cached FOLDER                   prints a scalar DTensor's staged value of two saves, at 0 and at 1
dcp_async_save.py empty FOLDER                    prints whether a sharded tensor without a shard is staged as it is
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainers import dcp_saving
from trainers.ranks import free_port


def staged_values() -> list[float]:
    """The values that a stager with a cache returns, read after another step."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    local = torch.zeros(dcp_saving.SHAPE)
    found = []
    for _ in range(2):
        # As a state dict of each save has it: another object on the same memory.
        staged = stager.stage({"scale": dcp_saving.KINDS["scalar DTensor"](local)})
        local += 1
        found.append(staged["scale"].item())
    dist.destroy_process_group()
    return found


def is_staged_as_it_is() -> bool:
    """Whether a stager returns a sharded tensor that has no shard on this rank, on a backend other than Gloo.

    A conversion would ask for the GPU there, and fail on this rank alone.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    own = [ShardMetadata([0, 0], [4, 3], "rank:0/cpu")]
    described = ShardedTensorMetadata(own, torch.Size([4, 3]), TensorProperties(torch.float32))
    tensor = ShardedTensor._init_from_local_shards_and_global_metadata([], described)
    return BlockingAsyncStager().stage({"weight": tensor})["weight"] is tensor


def main(target: str, folder: Path, *kinds: str) -> None:
    if target == "empty":
        print(json.dumps(is_staged_as_it_is()))
        return
    if target == "cached":
        print(json.dumps(staged_values()))
        return
    chosen = {"kinds": kinds} if kinds else {}
    print(json.dumps(dcp_saving.save_and_step(0, folder, by_writer=target == "writer", **chosen)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
