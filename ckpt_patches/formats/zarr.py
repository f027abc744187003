"""Zarr arrays as Megatron writes them: a folder per array, with `.zarray` and a file of raw bytes per chunk.

The format: Zarr v2 without compression, chunks in C order; see https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html.
"""

import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_patches.formats.dtypes import ITEM_SIZE
from ckpt_patches.formats.paths import LeavesFolderError, path_within
from ckpt_patches.formats.ranged import read_metadata
from ckpt_patches.formats.torch_file import BadFileError, NotReadError
from ckpt_patches.runtime.shown import shown

LARGEST = 1 << 20  # bytes of the metadata
MOST_DIMENSIONS = 64
METADATA, ATTRIBUTES = ".zarray", ".zattrs"
LOCKS = ".sync"  # suffix of the folder with an array's locks
MOST_MISSING = 100_000  # chunks of an array; if more are missing, the shape is wrong
# torch's dtype by zarr's. Dtypes that NumPy lacks have the names of ml_dtypes.
DTYPES = {
    **{f"<f{size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"<i{size}": f"int{8 * size}" for size in (2, 4, 8)},
    **{f"<u{size}": f"uint{8 * size}" for size in (2, 4, 8)},
    **{f"<c{size}": f"complex{8 * size}" for size in (8, 16)},
    "|i1": "int8",
    "|u1": "uint8",
    "|b1": "bool",
    **{name: name for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")},
    "float8_e8m0fnu": "float8_e8m0fnu",
}


@dataclass(frozen=True)
class Array:
    """The metadata of one array."""

    path: Path  # its folder
    dtype: str  # torch's name
    shape: tuple[int, ...]
    chunks: tuple[int, ...]  # shape of a chunk
    separator: str = "."

    @property
    def name(self) -> str:
        return self.path.name

    def labels(self) -> Iterator[str]:
        """The file names of all chunks."""
        grid = [range(-(-size // chunk)) for size, chunk in zip(self.shape, self.chunks, strict=True)]
        for index in itertools.product(*grid):
            yield self.separator.join(map(str, index)) or "0"

    def places(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """The offsets of each chunk's first element, and the chunk's file name."""
        grid = [range(0, size, chunk) for size, chunk in zip(self.shape, self.chunks, strict=True)]
        return zip(itertools.product(*grid), self.labels(), strict=True)

    @property
    def chunk_bytes(self) -> int:
        """Bytes per chunk. Chunks at an edge also have the full size."""
        return math.prod(self.chunks) * ITEM_SIZE[self.dtype]


def arrays(path: Path) -> list[Path]:
    """The folders of a checkpoint's arrays, without folders of locks."""
    folders = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and not folder.name.endswith(LOCKS)]
    return [folder for folder in folders if is_array(folder)]


def is_array(folder: Path) -> bool:
    """Whether a folder has an array. An array without metadata still has its chunks."""
    return (folder / METADATA).exists() or any(file.name[0].isdigit() for file in folder.iterdir())


def _check_links(folder: Path) -> None:
    """Refuse an array with a file that is a link out of the checkpoint, whose content a conversion would copy."""
    for base, folders, files in os.walk(folder):
        for name in (*folders, *files, "."):
            if os.path.islink(os.path.join(base, name).removesuffix("/.")):
                path_within(folder.parent, str(Path(base, name).relative_to(folder.parent)))


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > MOST_DIMENSIONS or any(type(value) is not int for value in values):
        raise ValueError(f"expected a list of numbers, found {shown(values)}")
    return tuple(values)


def read_array(folder: Path) -> Array:
    """Read the metadata of an array.

    Raises:
        BadFileError: the metadata is missing or invalid.
        NotReadError: the chunks are not raw bytes in C order, or have an unknown dtype.
    """
    path = folder / METADATA
    try:
        _check_links(folder)
        metadata = json.loads(read_metadata(path, LARGEST))
        shape, chunks = (_numbers(metadata[key]) for key in ("shape", "chunks"))
        if len(shape) != len(chunks) or any(n < 0 for n in shape) or any(n < 1 for n in chunks):
            raise ValueError(f"expected chunks {chunks} to divide the shape {shape}")
        dtype, separator = metadata["dtype"], metadata.get("dimension_separator", ".")
        if separator not in (".", "/"):
            raise ValueError(f"expected . or / between the numbers of a chunk, found {shown(separator)}")
        raw = metadata["compressor"] is None and not metadata["filters"] and metadata["order"] == "C"
    except LeavesFolderError as error:
        raise NotReadError(str(error)) from None
    except OSError as error:
        raise BadFileError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadFileError(f"{path} is corrupt: {type(error).__name__}: {error}") from None
    expected, there = (
        math.prod(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True)),
        len(os.listdir(folder)),
    )
    if expected > MOST_MISSING + there:
        raise BadFileError(f"{path}: {expected} chunks by its shape {list(shape)}, and there are {there} files")
    if not raw:
        raise NotReadError(f"{path}: expected raw chunks in C order, which is what Megatron writes")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise NotReadError(f"{path}: expected a type of elements that is known here, found {shown(dtype)}")
    return Array(folder, DTYPES[dtype], shape, chunks, separator)
