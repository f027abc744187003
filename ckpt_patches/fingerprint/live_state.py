"""This rank's part of the optimizer's state in a running job, and its sums."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ckpt_patches.fingerprint import boxes, on_device
from ckpt_patches.fingerprint.boxes import Box
from ckpt_patches.fingerprint.record import Settings
from ckpt_patches.fingerprint.states import bits_of
from ckpt_patches.fingerprint.verdict import Key, Total

BLOCK = 1 << 21  # elements that are processed together on the CPU
ON_DEVICE = 1 << 22  # the same on a GPU
THREADS = 4  # at most: each has a block of its own, in up to 16 MiB, or 28 MiB if rows are shorter than boxes.LONG


class Part(NamedTuple):
    """Elements of one state of one parameter that this rank holds."""

    parameter: str  # its name in checkpoints
    state: str  # "master", or the optimizer's name for it
    box: Box  # in the full parameter, without parallelism
    first: int  # index of the first element in the box
    values: torch.Tensor  # one dimension, contiguous; float32, bfloat16 or float16, on any device
    main: bool  # whether it is the first of its replicas, the only one that a save counts
    kept_in: str = ""  # dtype in which the optimizer keeps them, if it has converted them


@dataclass(frozen=True)
class Live:
    """A rank's description of its state."""

    parts: Callable[[], Iterable[Part]]  # a function, as the parts are read more than once
    settings: Mapping[str, Settings] = field(default_factory=dict)  # by parameter
    left_out: Mapping[str, str] = field(default_factory=dict)  # what has no fingerprint, and why
    shared: Mapping[Key, Key] = field(default_factory=dict)  # states that share memory with another one
    buckets: Mapping[str, Any] = field(default_factory=dict)  # see Record
    others: Mapping[str, Settings] = field(default_factory=dict)  # see Record

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copy and pickle as None, when other code than `dist_checkpointing.save` copies or writes a state dict."""
        return type(None), ()


def sums(parts: Iterable[Part], *, main: bool) -> dict[Key, Total]:
    """The totals of this rank's elements of each state; with `main`, only of the first replicas."""
    found: dict[Key, Total] = {}
    for part in parts:
        if main and not part.main:
            continue
        whole, dtype = math.prod(part.box.shape), part.kept_in or _dtype(part.values)
        one = found.setdefault((part.parameter, part.state), Total(whole=whole, dtype=dtype))
        one.add(len(part.values), _value(part))
    return found


def in_one_memory(tensors: Iterable[tuple[Key, torch.Tensor]]) -> dict[Key, Key]:
    """The states that share memory with another one: a step would change that memory twice.

    Args:
        tensors: contiguous tensors of states, including steps that are tensors.
    """
    places = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, key)
        for key, tensor in tensors
        if tensor.numel() and tensor.data_ptr()
    )
    found: dict[Key, Key] = {}
    for before, after in itertools.pairwise(places):
        if before[0] == after[0] and after[1] < before[2] and before[3] != after[3]:
            found[after[3]] = before[3]
    return found


def _slices(values: torch.Tensor) -> list[slice]:
    numel = BLOCK if values.device.type == "cpu" else ON_DEVICE
    return [slice(begin, begin + numel) for begin in range(0, len(values), numel)]


def _block(part: Part, at: slice) -> tuple[int, Any]:
    values = part.values[at]
    return part.first + at.start, _bits(values) if values.device.type == "cpu" else values.float().view(torch.int32)


def _value(part: Part) -> int:
    is_on_cpu = part.values.device.type == "cpu"
    of_box = boxes.of_box if is_on_cpu else on_device.of_box

    def of_block(at: slice) -> int:
        first, bits = _block(part, at)
        return of_box(bits, first, part.box)

    blocks = _slices(part.values)
    threads = min(torch.get_num_threads(), THREADS, len(blocks)) if is_on_cpu else 1
    if threads < 2:
        return sum(map(of_block, blocks))
    try:
        with ThreadPoolExecutor(threads) as pool:  # NumPy computes without the interpreter's lock
            return sum(pool.map(of_block, blocks))
    except RuntimeError:  # no thread starts at the interpreter's exit
        return sum(map(of_block, blocks))


def _bits(values: torch.Tensor) -> Any:
    """The bits of elements on the CPU. They are passed as bytes, because NumPy has no bfloat16."""
    return bits_of(memoryview(values.detach().view(torch.uint8).numpy()), _dtype(values))


def _dtype(values: torch.Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")
