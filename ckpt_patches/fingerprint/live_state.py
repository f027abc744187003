"""This rank's part of the optimizer's state in a running job, and its sums."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ckpt_patches.fingerprint.element_hash import MODULUS, Box, of_box
from ckpt_patches.fingerprint.record import Key, Settings
from ckpt_patches.fingerprint.states import in_words, words_of, words_per_element
from ckpt_patches.formats.dtypes import FLOATS

BLOCK = 1 << 21  # elements that are processed together on the CPU
ON_DEVICE = 1 << 22  # the same on a GPU
UNLIKE = "it has no element for each of the parameter's"  # of a state that has no fingerprint
THREADS = 4  # at most: each has a block of its own, in up to 28 MiB


class Part(NamedTuple):
    """Elements of one state of one parameter that this rank holds."""

    parameter: str  # its name in checkpoints
    state: str  # "master", or the optimizer's name for it
    box: Box  # in the full parameter, without parallelism
    first: int  # index of the first element in the box
    values: torch.Tensor  # in C order; of a dtype in states.IN_A_RUN, on any device
    # Whether it is the first of its replicas. Of complete parameters, it is that of the first rank that holds one.
    main: bool = True
    kept_in: str = ""  # dtype in which the optimizer keeps them, if it has converted them


@dataclass(frozen=True)
class Live:
    """A rank's description of its state."""

    parts: Callable[[], Iterable[Part]]  # a function: a part may be a copy, of which one at a time is held
    settings: Mapping[str, Settings] = field(default_factory=dict)  # by parameter
    left_out: Mapping[str, str] = field(default_factory=dict)  # what has no fingerprint, and why
    shared: Mapping[Key, Key] = field(default_factory=dict)  # states that share memory with another one
    buckets: Mapping[str, Any] = field(default_factory=dict)  # see Record
    others: Mapping[str, Settings] = field(default_factory=dict)  # see Record

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copy and pickle as None, when other code than `dist_checkpointing.save` copies or writes a state dict."""
        return type(None), ()


@dataclass
class Sums:
    """The sums over a rank's elements of one state, including replicas, and over the main ones."""

    whole: int  # elements of the full parameter
    dtype: str
    numel: int = 0
    value: int = 0  # modulo 2^64
    main_numel: int = 0
    main_value: int = 0


def sums(parts: Iterable[Part]) -> dict[Key, Sums]:
    """The sums of this rank's elements of each state."""
    found: dict[Key, Sums] = {}
    for part in parts:
        one = found.setdefault(
            (part.parameter, part.state), Sums(math.prod(part.box.shape), part.kept_in or dtype_of(part.values))
        )
        numel, value = part.values.numel(), _value(part)
        one.numel, one.value = one.numel + numel, (one.value + value) % MODULUS
        if part.main:
            one.main_numel, one.main_value = one.main_numel + numel, (one.main_value + value) % MODULUS
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


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a checkpoint saves, and their names."""
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
                yield name, buffer


def _value(part: Part) -> int:
    dtype, values = dtype_of(part.values), part.values.detach().reshape(-1)  # a copy at most of one part at a time
    values = values if dtype in FLOATS else values.cpu()
    is_on_cpu = values.device.type == "cpu"
    numel = BLOCK if is_on_cpu else ON_DEVICE
    begins = range(0, len(values), numel)

    def of_block(begin: int) -> int:
        first = (part.first + begin) * words_per_element(dtype)
        return of_box(_words(values[begin : begin + numel]), first, in_words(part.box, dtype))

    threads = min(torch.get_num_threads(), THREADS, len(begins)) if is_on_cpu else 1
    if threads > 1:
        try:
            with ThreadPoolExecutor(threads) as pool:  # NumPy computes without the interpreter's lock
                return sum(pool.map(of_block, begins))
        except RuntimeError:  # no thread starts at the interpreter's exit
            pass
    return sum(map(of_block, begins))


def _words(values: torch.Tensor) -> Any:
    """The words of elements. On the CPU they are passed as bytes, because NumPy has no bfloat16."""
    if values.device.type == "cpu":
        return words_of(memoryview(values.view(torch.uint8).numpy()), dtype_of(values))
    return values.float().view(torch.int32)


def dtype_of(values: torch.Tensor) -> str:
    """The name of a tensor's dtype, as in records."""
    return str(values.dtype).removeprefix("torch.")
