"""apex's optimizers on a CPU: its csrc/ kernels reimplemented in torch, and a stub GPU.

apex's Python code is the installed one.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from trainers import fake_gpu
from trainers.gpu import REAL_GPU
from trainers.stub_fused_adam import joined, split


def install() -> None:
    """Install the stubs. Call this before apex is imported; it does nothing on a real GPU."""
    if REAL_GPU:
        return
    fake_gpu.install()
    _module(
        "amp_C",
        multi_tensor_adam=_adam,
        multi_tensor_adam_capturable=_adam_capturable,
        multi_tensor_adam_capturable_master=_adam_capturable,
    )
    _module(
        "distributed_adam_cuda",
        multi_tensor_fused_adam=_distributed_adam,
        multi_tensor_fused_adam_with_param_remainders=_adam_with_remainders,
    )
    _module("fused_adam_cuda", maybe_cast_mt=_copy)
    vars(torch.distributed.distributed_c10d)["_coalescing_manager"] = _one_by_one


def _module(name: str, **kernels: Callable[..., None]) -> None:
    """Register a stub of a compiled module. Kernels that are not defined here exist, but raise when called."""
    module = ModuleType(name)
    vars(module).update({kernel: _without_gradients(call) for kernel, call in kernels.items()}, __getattr__=_kernel)
    sys.modules[name] = module


def _without_gradients(kernel: Callable[..., None]) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        with torch.no_grad():
            kernel(*arguments)

    return call


def _kernel(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*_: Any) -> None:
        raise NotImplementedError(f"{name} is not defined without a GPU")

    return call


@contextlib.contextmanager
def _one_by_one(group: Any, device: Any, reqs: Any) -> Iterator[None]:
    """`_coalescing_manager` of torch 2.0: Gloo does not coalesce collectives, and apex waits for each."""
    yield


def _adam_capturable(
    size: int, skip: Any, lists: Any, lr: Any, b1: Any, b2: Any, eps: Any, step: Any, *how: Any
) -> None:
    """Adam with or without fp32 main parameters as a fifth list."""
    mode, correct, decay, inverse_scale = how
    if int(skip) == 1:
        return
    for gradient, parameter, *moments_and_master in zip(*lists, strict=True):
        *moments, master = moments_and_master if len(lists) == 5 else (*moments_and_master, parameter)
        gradient.copy_(gradient.float() * inverse_scale)
        value = _adam_value(master, gradient, *moments, float(lr), b1, b2, eps, int(step), mode, correct, decay)
        master.copy_(value)
        parameter.copy_(value)


def _adam(size: int, skip: Any, lists: Any, lr: Any, b1: Any, b2: Any, eps: Any, step: Any, *how: Any) -> None:
    for gradient, parameter, *moments in zip(*lists, strict=True):
        parameter.copy_(_adam_value(parameter, gradient, *moments, lr, b1, b2, eps, step, *how))


def _distributed_adam(size: int, skip: Any, lists: Any, scale: Any, *how: Any) -> None:
    for value, first, second, gradient, out in zip(*lists, strict=True):
        value.copy_(_adam_value(value, gradient.float() * scale, first, second, *how))
        out.copy_(value)


def _adam_with_remainders(size: int, skip: Any, lists: Any, scale: Any, *how: Any) -> None:
    """Adam whose main parameters are weights and remainders."""
    for weight, remainder, first, second, gradient, out in zip(*lists, strict=True):
        master = joined(weight, remainder)
        split(_adam_value(master, gradient.float() * scale, first, second, *how), out, remainder)


def _adam_value(
    value: Any, gradient: Any, first: Any, second: Any, lr: Any, b1: Any, b2: Any, eps: Any, step: Any, *how: Any
) -> torch.Tensor:
    """The updated parameter in fp32; the moments are updated in place."""
    mode, correct, decay = how
    value, gradient = value.float(), gradient.float()
    gradient = gradient if mode else gradient + decay * value
    first.mul_(b1).add_(gradient, alpha=1 - b1)
    second.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
    of_first, of_second = (1 - b1**step, 1 - b2**step) if correct else (1.0, 1.0)
    update = (first / of_first) / ((second / of_second).sqrt() + eps)
    return value - lr * (update + decay * value if mode else update)


def _copy(size: int, skip: Any, lists: Any) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source)
