"""Asynchronous saves by the real nvidia-resiliency-ext on one CPU rank, in the format of torch_dist."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from trainers import fake_gpu
from trainers.gpu import REAL_GPU
from trainers.keeper import fork_keeper
from trainers.ranks import call_after, free_port

if not REAL_GPU:
    fake_gpu.install()

import torch  # after the stub GPU is installed
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.multiprocessing.reductions import reduce_tensor

PARAMETERS, NUMEL = 12, 1000
TENSORS = 4 * PARAMETERS  # each with step, exp_avg and exp_avg_sq


@contextlib.contextmanager
def calls(persistent: bool = True, **options: Any) -> Iterator[Any]:
    """The queue of asynchronous calls, in a process group with only this rank."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt import filesystem_async
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

    fork_keeper(filesystem_async)
    join_group(0, 1, free_port())
    queue = AsyncCallsQueue(persistent=persistent, **options)
    try:
        yield queue
    finally:
        queue.close()
        dist.destroy_process_group()


def join_group(rank: int, ranks: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)


def flat_state(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and optimizer states by name, not copied."""
    state: dict[str, torch.Tensor] = {}
    for number, parameter in enumerate(parameters):
        state[f"model.{number}"] = parameter.detach()
        state |= {f"optimizer.{number}.{key}": value for key, value in optimizer.state[parameter].items()}
    return state


def request(state: Mapping[str, torch.Tensor], folder: Path, **options: Any) -> Any:
    """The request that a trainer schedules to save a state into a folder. `options` are for NVRx's writer."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
    from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
    from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
        save_state_dict_async_finalize,
        save_state_dict_async_plan,
    )

    os.makedirs(folder, exist_ok=True)
    writer = FileSystemWriterAsync(folder, thread_count=2, **options)
    planned = save_state_dict_async_plan(dict(state), writer, None, 0, planner=dcp.DefaultSavePlanner())
    write, stage, arguments = writer.get_save_function_and_args()
    return AsyncRequest(
        write, arguments, [lambda: save_state_dict_async_finalize(*planned)], async_fn_kwargs={}, preload_fn=stage
    )


class OnDevice(torch.Tensor):
    """A stub for a tensor on a GPU: it reports a GPU device, and workers share its memory instead of a copy."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def _reduce_by_memory(tensor: OnDevice) -> Any:
    return reduce_tensor(tensor.as_subclass(torch.Tensor))


ForkingPickler.register(OnDevice, _reduce_by_memory)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU, or the stub for one."""
    return tensor.cuda() if REAL_GPU else tensor.as_subclass(OnDevice)


def load(folder: Path, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The values of these tensors in a checkpoint."""
    loaded = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return loaded


def save_and_step(rank: int, checkpoint: Path, options: dict[str, Any]) -> int:
    """The number of wrong tensors in a checkpoint of CPU tensors that the worker writes only after the next step."""
    stepped = checkpoint.with_suffix(".stepped")
    parameters = [torch.nn.Parameter(torch.full((NUMEL,), float(number))) for number in range(PARAMETERS)]
    optimizer = torch.optim.AdamW(parameters)
    step(parameters, optimizer)
    state = flat_state(parameters, optimizer)
    wanted = {name: tensor.clone() for name, tensor in state.items()}
    with calls(**options) as queue:
        asked = request(state, checkpoint)
        queue.schedule_async_request(asked._replace(async_fn=partial(call_after, stepped, asked.async_fn)))
        step(parameters, optimizer)
        stepped.touch()
        queue.maybe_finalize_async_calls(blocking=True)
    loaded = load(checkpoint, wanted)
    return sum(not torch.equal(loaded[name], wanted[name]) for name in wanted)


def step(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
