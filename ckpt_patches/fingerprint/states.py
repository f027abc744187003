"""Fingerprints of the states of parameters: computed from blocks of bytes, and compared between checkpoints."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_patches.errors import UserError
from ckpt_patches.fingerprint.element_hash import MODULUS, of_run

# Names of the main parameter in the formats of DeepSpeed, Megatron up to 0.15 and later Megatron.
MASTERS = ("fp32", "fp32_param", "param")
FROZEN = "frozen"  # the state of a parameter that no optimizer steps: its own elements
OF_BUFFER = "buffer"  # the same of a buffer
BLOCK = 1 << 24  # bytes per read; a multiple of every element size


class Fingerprint(NamedTuple):
    """The fingerprint of one state of one parameter."""

    parameter: str
    state: str  # "master", "exp_avg", "exp_avg_sq"; "model" if it is not an optimizer's state
    numel: int
    value: int  # 64 bits, see element_hash

    @property
    def hexadecimal(self) -> str:
        return f"{self.value:016x}"


def state_named(name: str) -> str:
    """The name of a state, equal for all formats."""
    return "master" if name in MASTERS else name


def bits_of(data: memoryview, dtype: str) -> npt.NDArray[np.uint32]:
    """The bits of the elements as 32-bit floats, which represent 16-bit floats exactly.

    Raises:
        UserError: another dtype, which 32-bit floats cannot represent exactly.
    """
    if dtype == "float32":
        return np.frombuffer(data, "<u4")
    if dtype == "bfloat16":
        return np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)
    if dtype == "float16":
        return np.frombuffer(data, "<f2").astype(np.float32).view(np.uint32)
    raise UserError(f"expected elements of float32, bfloat16 or float16, found {dtype}: they have no fingerprint")


def buffer_digest(dtype: str, shape: Sequence[int], data: Iterable[memoryview]) -> str:
    """A digest of a buffer's dtype (torch's name), shape and bytes."""
    digest = hashlib.blake2b(f"torch.{dtype} {tuple(shape)}".encode(), digest_size=8)
    for block in data:
        digest.update(block)
    return digest.hexdigest()


def of_blocks(blocks: Iterable[memoryview], dtype: str) -> int:
    """The fingerprint of a full tensor, given as blocks of its elements in order."""
    found, begin = 0, 0
    for block in blocks:
        bits = bits_of(block, dtype)
        found += of_run(bits, begin)
        begin += len(bits)
    return found % MODULUS
