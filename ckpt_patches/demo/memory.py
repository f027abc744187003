"""Measure the memory that a call takes on a rank, with large parameters."""

import ctypes
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ckpt_patches.demo import megatron_training as mt

MIB = 2**20
LARGE_PARAMS = 4
M_MMAP_THRESHOLD = -3  # from malloc.h


def return_freed_memory() -> None:
    """Make the C library return freed memory: else the next call reuses it and seems to need less."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)


def large(elements: int, bucket_size: int | None = None) -> Any:
    """The distributed optimizer of LARGE_PARAMS parameters with `elements` elements each, after a step."""

    def make(config: Any, dtype: torch.dtype, native_fp32: bool) -> Any:
        model = mt.tiny_model(config, dtype, native_fp32)
        del model.a, model.b
        params = [torch.ones(elements, dtype=dtype) for _ in range(LARGE_PARAMS)]
        model.large = torch.nn.ParameterList(params)
        return model

    model, optimizer = mt.build(bucket_size=bucket_size, make_model=make)
    for param in model.parameters():
        param.main_grad.fill_(0.5)  # as after a backward pass
    optimizer.step()
    return mt.inner(optimizer)


def peak(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """A call's return value, the peak growth of this process (MiB), and the duration (seconds)."""
    gc.collect()
    dist.barrier()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak to the current size
    before = resident("VmRSS")
    start = time.perf_counter()
    returned = call()
    seconds = time.perf_counter() - start
    return returned, resident("VmHWM") - before, seconds


def resident(line: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(text.split()[1]) for text in file if text.startswith(line)) / 1024


def size(state: Any) -> float:
    """The size of all tensors, in MiB."""
    if isinstance(state, dict):
        return sum(map(size, state.values()))
    return state.numel() * state.element_size() / MIB if isinstance(state, torch.Tensor) else 0.0
