"""Fingerprints of the states of parameters, computed from blocks of bytes."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_patches.fingerprint.element_hash import MODULUS, Box, of_run
from ckpt_patches.formats.dtypes import FLOATS, item_size

# Names of the main parameter in the formats of DeepSpeed, Megatron up to 0.15 and later Megatron.
MASTERS = ("fp32", "fp32_param", "param")
FROZEN = "frozen"  # the state of a parameter that no optimizer steps: its own elements
OF_BUFFER = "buffer"  # the same of a buffer
BLOCK = 1 << 24  # bytes per read; a multiple of every element size
WORD = 4  # bytes
IN_A_RUN = (*FLOATS, "float64", "int64", "int32", "int16", "int8", "uint8", "bool")  # dtypes with a fingerprint


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


def words_per_element(dtype: str) -> int:
    return max(item_size(dtype) // WORD, 1)


def words_of(data: memoryview, dtype: str) -> npt.NDArray[np.uint32]:
    """The elements as words of 32 bits.

    Floats of 16 bits are converted to 32 bits, which represent them exactly. A longer element is several words.
    """
    if dtype == "bfloat16":
        return np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)
    if dtype == "float16":
        return np.frombuffer(data, "<f2").astype(np.float32).view(np.uint32)
    return np.frombuffer(data, f"<u{min(item_size(dtype), WORD)}").astype(np.uint32, copy=False)


def in_words(box: Box, dtype: str) -> Box:
    """A box of elements as one of their words, which are on an axis of their own."""
    words = words_per_element(dtype)
    return box if words == 1 else Box((*box.offsets, 0), (*box.size, words), (*box.shape, words))


def of_blocks(blocks: Iterable[memoryview], dtype: str) -> int:
    """The fingerprint of a full tensor, given as blocks of its elements in order."""
    found, begin = 0, 0
    for block in blocks:
        words = words_of(block, dtype)
        found += of_run(words, begin)
        begin += len(words)
    return found % MODULUS
