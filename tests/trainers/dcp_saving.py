"""Asynchronous saves by `torch.distributed.checkpoint` on one CPU rank, of each kind of tensor in state dicts."""

import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.device_mesh import init_device_mesh

from trainers.ranks import free_port

try:
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor import Shard as Sharded
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor, Replicate
    from torch.distributed._tensor import Shard as Sharded

SHAPE = (4, 3)


class AfterStep(dcp.DefaultSavePlanner):
    """A planner whose save begins after the step."""

    def __init__(self, stepped: threading.Event) -> None:
        super().__init__()
        self.stepped = stepped

    def create_local_plan(self) -> dcp.SavePlan:
        self.stepped.wait()
        return super().create_local_plan()


def _dtensor(local: torch.Tensor, placement: Sharded | Replicate) -> DTensor:
    return DTensor.from_local(local, init_device_mesh("cpu", (1,)), [placement])


def _sharded_tensor(local: torch.Tensor) -> ShardedTensor:
    """As FSDP's first version without a device mesh saves parameters."""
    return ShardedTensor._init_from_local_shards([Shard.from_tensor_and_offsets(local, [0, 0], 0)], local.shape)


# By kind: makes the tensor, which shares the memory of a local one.
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tensor": lambda local: local,
    "parameter": torch.nn.Parameter,
    "DTensor": lambda local: _dtensor(local, Sharded(0)),
    "ShardedTensor": _sharded_tensor,
    "scalar": lambda local: local[0, 0],
    "scalar DTensor": lambda local: _dtensor(local[0, 0], Replicate()),
}


def save_and_step(
    rank: int, folder: Path, *, by_writer: bool = True, kinds: tuple[str, ...] = tuple(KINDS)
) -> list[str]:
    """The kinds of tensors in a checkpoint that are those of the step after the save."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=rank, world_size=1)
    memory = {kind: torch.zeros(SHAPE) for kind in kinds}
    state = {"model": {kind: KINDS[kind](local) for kind, local in memory.items()}}
    stepped = threading.Event()
    target = {"storage_writer": dcp.FileSystemWriter(folder)} if by_writer else {"checkpoint_id": folder}
    saving = dcp.async_save(state, planner=AfterStep(stepped), **target)
    for local in memory.values():
        local += 1
    stepped.set()
    saving.result()
    for local in memory.values():
        local.fill_(7)
    dcp.load(state, checkpoint_id=folder)
    dist.destroy_process_group()
    return [kind for kind, local in memory.items() if local[0, 0] != 0]
