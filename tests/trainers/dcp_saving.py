"""Asynchronous saves by `torch.distributed.checkpoint` on one CPU rank, of each kind of tensor in state dicts."""

import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from ckpt_patches import fingerprint
from trainers.ranks import free_port

try:
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor import Shard as Sharded
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor, Replicate
    from torch.distributed._tensor import Shard as Sharded

SHAPE = (4, 3)
PARTS = ("model", "optimizer", "ckpt_patches_fingerprint")


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


def save_step_and_prove(rank: int, folder: Path) -> str:
    """Save with a fingerprint and step before it writes. Returns the error of the proof after a load, or ""."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=rank, world_size=1)
    model, optimizer = trained(steps=2)
    stepped = threading.Event()
    record = fingerprint.of_training(model, optimizer)
    state = dict(zip(PARTS, (*get_state_dict(model, optimizer), record), strict=True))
    saving = dcp.async_save(state, planner=AfterStep(stepped), storage_writer=dcp.FileSystemWriter(folder))
    step(model, optimizer)
    stepped.set()
    saving.result()
    model, optimizer = trained(steps=1)
    state = dict(zip(PARTS, (*get_state_dict(model, optimizer), ""), strict=True))
    dcp.load(state, checkpoint_id=folder)
    of_model, of_optimizer, record = (state[part] for part in PARTS)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    try:
        fingerprint.prove(model, optimizer, record)
    except fingerprint.FingerprintError as error:
        return str(error)
    return ""


def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of one scalar DTensor, the kind that every release of torch has the bug with, and its optimizer."""
    model = torch.nn.ParameterDict({"scale": _dtensor(torch.ones(()), Replicate())})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (scale,) = model.parameters()
    scale.pow(2).to_local().backward()
    optimizer.step()
