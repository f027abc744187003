"""What this rank of a running job holds of the optimizer's state, and what that comes to."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt_patches.fingerprint import boxes, on_device
from ckpt_patches.fingerprint.boxes import Box
from ckpt_patches.fingerprint.element_hash import MODULUS
from ckpt_patches.fingerprint.record import SAMPLE, Settings, State, sample_place
from ckpt_patches.fingerprint.states import bits_of
from ckpt_patches.fingerprint.verdict import Key, Total

BLOCK = 1 << 22  # elements that are looked at together


class Part(NamedTuple):
    """Elements of one state of one parameter that this rank holds."""

    parameter: str  # as it is called in checkpoints
    state: str  # "master", or as the optimizer calls it
    box: Box  # in the whole parameter, as it is without parallelism
    first: int  # of these elements, in the box
    values: torch.Tensor  # in one dimension and contiguous; float32, bfloat16 or float16, anywhere
    main: bool  # whether it is the first of its replicas, which a save counts


@dataclass(frozen=True)
class Live:
    """What a rank says of its state."""

    parts: Callable[[], Iterable[Part]]  # to go through more than once
    settings: Mapping[str, Settings] = field(default_factory=dict)  # by parameter
    left_out: Mapping[str, str] = field(default_factory=dict)  # what has no fingerprint, and why
    shared: Mapping[Key, Key] = field(default_factory=dict)  # states in the memory of another one
    buckets: Mapping[str, Any] = field(default_factory=dict)  # see Record
    others: Mapping[str, Settings] = field(default_factory=dict)  # see Record

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """In a state dict that is copied or written by others than `dist_checkpointing.save`: nothing."""
        return type(None), ()


@dataclass
class Sums:
    """Of one state: what this rank's elements of it come to."""

    numel: int = 0
    value: int = 0
    whole: int = 0  # elements of the whole parameter
    dtype: str = ""
    sample: dict[int, int] = field(default_factory=dict)  # bits by place

    def as_state(self) -> State:
        return State(self.numel, self.value, self.dtype, self.sample)

    def as_total(self) -> Total:
        return Total(self.numel, self.value, self.whole, self.dtype)


def sums(parts: Iterable[Part], *, main: bool) -> dict[Key, Sums]:
    """What the elements of each state come to; with `main`, of the first replicas alone, and with their samples."""
    found: dict[Key, Sums] = {}
    for part in parts:
        if main and not part.main:
            continue
        one = found.setdefault((part.parameter, part.state), Sums())
        one.numel += len(part.values)
        one.value = (one.value + _value(part)) % MODULUS
        one.whole, one.dtype = math.prod(part.box.shape), _dtype(part.values)
        if main:
            one.sample.update(_sample(part))
    return found


def in_one_memory(tensors: Iterable[tuple[Key, torch.Tensor]]) -> dict[Key, Key]:
    """States that have memory of another one: a step changes that twice, whatever is in it now.

    Args:
        tensors: of states, contiguous; steps that are tensors too.
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


def blocks_of(part: Part) -> Iterator[tuple[int, Any]]:
    """The bits of a part's elements, block by block, and the first of each in the box: NumPy's, or the device's."""
    for begin in range(0, len(part.values), BLOCK):
        values = part.values[begin : begin + BLOCK]
        yield part.first + begin, _bits(values) if values.device.type == "cpu" else values.float().view(torch.int32)


def _value(part: Part) -> int:
    of_box = boxes.of_box if part.values.device.type == "cpu" else on_device.of_box
    return sum(of_box(bits, first, part.box) for first, bits in blocks_of(part))


def _bits(values: torch.Tensor) -> Any:
    """NumPy knows no bfloat16: the elements are handed over as bytes."""
    return bits_of(memoryview(values.detach().view(torch.uint8).numpy()), _dtype(values))


def _dtype(values: torch.Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _sample(part: Part) -> dict[int, int]:
    """Those of the state's sample that are among these elements."""
    begin = sample_place(math.prod(part.box.shape))
    wanted = {place: part.box.element(place) for place in range(begin, begin + SAMPLE)}
    here = {place: at - part.first for place, at in wanted.items() if at is not None}
    here = {place: at for place, at in here.items() if 0 <= at < len(part.values)}
    bits = part.values.detach()[list(here.values())].float().cpu().view(torch.int32).numpy().view(np.uint32)
    return dict(zip(here, bits.tolist(), strict=True))
