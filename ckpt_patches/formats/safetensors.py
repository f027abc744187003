"""safetensors: a JSON header with each tensor's dtype, shape and offsets, and then the tensors' bytes.

    8 bytes    the header's length, a little-endian integer
    header     {"<name>": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …, "__metadata__": {…}}
    tensors    without gaps; the offsets count from here

https://huggingface.co/docs/safetensors/index#format
"""

import json
import math
import os
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from ckpt_patches.formats.dtypes import ITEM_SIZE
from ckpt_patches.formats.ranged import open_regular
from ckpt_patches.formats.torch_file import BadFileError
from ckpt_patches.runtime.shown import shown

SUFFIX = ".safetensors"
METADATA = "__metadata__"
LONGEST_HEADER = 100_000_000  # bytes; the library's limit
BLOCK = 1 << 20  # bytes
_SIZES = {"F": ("float", (2, 4, 8)), "I": ("int", (1, 2, 4, 8)), "U": ("uint", (1, 2, 4, 8))}
DTYPES = {
    **{f"{letter}{8 * size}": f"{word}{8 * size}" for letter, (word, sizes) in _SIZES.items() for size in sizes},
    "BF16": "bfloat16",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


class Tensor(NamedTuple):
    """The position of a tensor in a file."""

    dtype: str  # torch's name; the format's own if torch lacks the dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name. Only the header is read.

    Raises:
        BadFileError: the file is truncated, corrupt, or not a safetensors file.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise BadFileError(f"{path} is truncated: its header does not end in it")
        if length > LONGEST_HEADER:
            raise BadFileError(f"{path}: expected a header of at most {LONGEST_HEADER} bytes, found {length}")
        data = file.read(length)
    try:
        return _checked(data, 8 + length, size)
    except BadFileError as error:
        raise BadFileError(f"{path} is corrupt: {error}") from None


def _checked(data: bytes, begin: int, size: int) -> dict[str, Tensor]:
    """The tensors that a header lists, with all numbers checked. Their bytes begin at `begin`."""
    try:
        header = json.loads(data, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"its header is no JSON ({type(error).__name__})") from None
    if not isinstance(header, dict):
        raise BadFileError("its header is no JSON object")
    found = {name: _tensor(name, value, begin) for name, value in header.items() if name != METADATA}
    ordered = sorted((tensor.offset, tensor.offset + tensor.nbytes) for tensor in found.values())
    for (_, before), (after, _) in pairwise([(begin, begin), *ordered, (size, size)]):
        if before > after:
            what = "the file is truncated" if after == size else "tensors overlap"
            raise BadFileError(f"{what}: one ends at byte {before}, expected at most {after}")
        if before < after:
            raise BadFileError(f"no tensor has the bytes from {before} to {after}")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise BadFileError("a name is twice in its header")
    return found


def _tensor(name: str, value: Any, begin: int) -> Tensor:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise BadFileError(f"{shown(name)} has no type, shape and offsets")
    torchs, nbytes, numel = DTYPES.get(dtype, dtype), offsets[1] - offsets[0], math.prod(shape)
    if nbytes < 0 or (torchs in ITEM_SIZE and nbytes != numel * ITEM_SIZE[torchs]):
        raise BadFileError(f"{shown(name)} has {nbytes} bytes for {numel} elements of {dtype:.50}")
    return Tensor(torchs, tuple(shape), begin + offsets[0], nbytes)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list) and len(value) < 100 and all(type(one) is int and 0 <= one < 1 << 63 for one in value)
    )


def zeros_from(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """The offset from which a file has zeros alone, up to its end. Its size if there are none, or no tensors.

    Raises:
        OSError: the file cannot be read.
    """
    begin = min((tensor.offset for tensor in tensors.values()), default=sys.maxsize)
    with os.fdopen(open_regular(path), "rb") as file:
        at = os.fstat(file.fileno()).st_size
        while at > begin:
            size = min(BLOCK, at - begin)
            kept = len(os.pread(file.fileno(), size, at - size).rstrip(b"\0"))
            at -= size - kept
            if kept:
                break
    return at
