"""Checkpoints of every format and kind that the suite writes, and the location of each tensor in their files.

Tensors are located by file headers, the index or the folders, independently of the audit's readers.
"""

import functools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import universal
from ckpt_patches.formats import stored_zip, torch_dist, torch_file
from ckpt_patches.formats.checkpoint import Extent
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.ranged import RangedFiles
from megatron_checkpoints import ZARR, Configuration, written
from upstream import newest, once, run, tree
from zero_checkpoints import trained

MODEL_SPACE, BUCKETS = "fully_sharded_model_space", "fully_sharded_bucket_space"
GATHERED = "dp_zero_gather_scatter"
NEWEST = newest("megatron-core")
TORCH_DIST = Configuration(ranks=2, backend="torch_dist", iterations="0,3")
TORCH = Configuration(ranks=2, backend="torch", iterations="1,3")


@functools.cache
def experts(stage: int) -> Path:
    """A real checkpoint in which expert-parallel ranks 0 and 1 have different experts with the same names."""
    release = tree("deepspeed", newest("deepspeed"))
    return once(f"experts-{stage}", lambda out: run("experts", out, str(stage), tree=release)) / "global_step8"


@dataclass(frozen=True)
class Kind:
    """A checkpoint that is written on first use."""

    write: Callable[[], Path]
    default: bool = False  # in the default run; the others with --every-release only

    @property
    def path(self) -> Path:
        return self.write()


def megatron(version: str, backend: str, kind: str, *, default: bool = False, tp: int = 1, dtype: str = "bf16") -> Kind:
    iterations = "30" if dtype == "fp16" else "3"  # the first steps in fp16 are skipped
    made = Configuration(version, 2 * tp, tp, dtype, iterations, format=kind, backend=backend)
    return Kind(lambda: written(made).whole[-1], default)


def zero(kind: str, version: str = "0.16.2", *, default: bool = False) -> Kind:
    return Kind(lambda: trained(version, kind)[kind], default)


def parallel(case: str, *, default: bool = False) -> Kind:
    return Kind(lambda: universal.parallel(case)[case], default)


@functools.cache
def _converted(source: Path, name: str) -> Path:
    return once(f"universal-{name}", lambda out: universal.ours(source, out))


def converted(kind: Kind, name: str, *, default: bool = False) -> Kind:
    """The universal checkpoint converted from a ZeRO checkpoint."""
    return Kind(lambda: _converted(kind.path, name), default)


MEGATRON = {
    "0.12, zarr": megatron("0.12.0", "zarr", MODEL_SPACE),
    "0.12, zarr, buckets": megatron("0.12.0", "zarr", BUCKETS),
    "0.14, zarr": Kind(lambda: written(ZARR).whole[-1], default=True),
    "0.14, zarr, tensor parallel": megatron("0.14.0", "zarr", MODEL_SPACE, tp=2),
    "0.14, zarr, buckets": megatron("0.14.0", "zarr", BUCKETS),
    "0.14, zarr, gathered": megatron("0.14.0", "zarr", GATHERED),
    "0.14, torch_dist": Kind(lambda: written(TORCH_DIST).whole[-1], default=True),
    "0.14, torch_dist, tensor parallel": megatron("0.14.0", "torch_dist", MODEL_SPACE, tp=2),
    "0.14, torch_dist, gathered": megatron("0.14.0", "torch_dist", GATHERED),
    "0.14, torch": Kind(lambda: written(TORCH).whole[-1], default=True),
    "0.15, torch_dist": megatron("0.15.3", "torch_dist", MODEL_SPACE),
    "0.16, fully_reshardable, tensor parallel": megatron("0.16.1", "torch_dist", "fully_reshardable", tp=2),
    "0.18, fully_reshardable": megatron("0.18.2", "torch_dist", "fully_reshardable"),
    "0.16, dp_reshardable": megatron("0.16.1", "torch_dist", "dp_reshardable"),
    "0.19, dp_reshardable": megatron(newest("megatron-core"), "torch_dist", "dp_reshardable"),
    "0.19, fully_reshardable": megatron(newest("megatron-core"), "torch_dist", "fully_reshardable", default=True),
    "0.19, fully_reshardable, fp16": megatron(newest("megatron-core"), "torch_dist", "fully_reshardable", dtype="fp16"),
    "0.19, fully_reshardable, tensor parallel": megatron(
        newest("megatron-core"), "torch_dist", "fully_reshardable", tp=2
    ),
    "0.19, gathered": megatron(newest("megatron-core"), "torch_dist", GATHERED, default=True),
    "0.19, torch": megatron(newest("megatron-core"), "torch", "dp_reshardable"),
}
ZERO = {
    "stage 1": zero("stage1"),
    "stage 1, BF16_Optimizer": zero("bf16_optimizer"),
    "stage 1, fp16": zero("stage1_fp16"),
    "stage 2": zero("stage2", default=True),
    "stage 2, fp16": zero("stage2_fp16"),
    "stage 3": zero("stage3", default=True),
    "stage 3, fp16": zero("stage3_fp16"),
    "stage 3, groups": zero("stage3_groups", newest("deepspeed"), default=True),
    "experts, stage 1": Kind(functools.partial(experts, 1), default=True),
    "experts, stage 2": Kind(functools.partial(experts, 2)),
    "pipeline and tensor parallel": parallel("megatron"),
    "tensor parallel, frozen weights": parallel("megatron_fp16", default=True),
    "sub-parameters": parallel("fused"),
    "sub-parameters, uneven": parallel("fused_uneven"),
    "AutoTP's maps": parallel("affine"),
    "stage 3, tensor parallel, uneven": parallel("zero3_uneven"),
    "stage 3, AutoTP's maps": parallel("zero3_affine"),
}
UNIVERSAL = {
    f"universal of {name}": converted(kind, name, default=name == "stage 2")
    for name, kind in ZERO.items()
    if "AutoTP's maps" not in name  # DeepSpeed's own converter has them
}
EVERY = {**MEGATRON, **ZERO, **UNIVERSAL}


# Locations of tensors


class Place(NamedTuple):
    """The location of a tensor's elements."""

    path: Path
    name: str
    dtype: str  # torch's name
    offset: int  # bytes
    numel: int
    zip: tuple[int, int] | None = None  # offset and size of the archive with its checksum
    first: tuple[int, ...] = ()  # of a chunk: its offsets in the tensor

    @property
    def nbytes(self) -> int:
        return self.numel * item_size(self.dtype)

    def data(self) -> bytes:
        with open(self.path, "rb") as file:
            return os.pread(file.fileno(), self.nbytes, self.offset)


def in_torch_file(path: Path) -> Iterator[Place]:
    found = torch_file.read(path, trust=True)
    for name, tensor in torch_file.tensors_in(found.value):
        yield Place(path, name, tensor.dtype, tensor.offset, tensor.numel, (0, found.size))


def in_torch_dist(folder: Path) -> Iterator[Place]:
    index = torch_dist.read_index(folder)
    with RangedFiles() as files:
        places: list[tuple[str, Extent, tuple[int, ...]]] = [(name, place, ()) for name, place in index.objects.items()]
        for name, chunked in index.tensors.items():
            places += [(name, place, first) for first, place in chunked.places.items()]
        for name, place, first in places:
            part = torch_dist.read_place(files, folder, place)
            for inner, tensor in torch_file.tensors_in(part.value, name):
                yield Place(part.path, inner, tensor.dtype, tensor.offset, tensor.numel, place[1:], first)


def in_zarr(folder: Path) -> Iterator[Place]:
    for metadata in (path for path in sorted(folder.glob("*/.zarray")) if path.parent.suffix != ".sync"):
        kind = json.loads(metadata.read_text())["dtype"]
        dtype = {"<f4": "float32", "<f2": "float16"}.get(kind, kind)
        for chunk in (file for file in sorted(metadata.parent.iterdir()) if file.name[0].isdigit()):
            numel = chunk.stat().st_size // item_size(dtype)
            yield Place(chunk, str(chunk.relative_to(folder)), dtype, 0, numel)


def tensors(folder: Path) -> list[Place]:
    """The locations of all tensors that have elements."""
    found = [place for path in sorted(folder.rglob("*.pt")) for place in in_torch_file(path)]
    if (folder / torch_dist.INDEX).exists():
        found += in_torch_dist(folder)
    found += in_zarr(folder)
    return [place for place in found if place.numel]


def put(place: Place, value: bytes, first: int = 0) -> None:
    """Overwrite elements from `first` on and update the checksum, as if the save had written this state."""
    with open(place.path, "r+b") as file:
        os.pwrite(file.fileno(), value, place.offset + first * item_size(place.dtype))
        if place.zip is not None:
            archive = stored_zip.Archive(file.fileno(), place.zip[1], place.zip[0])
            (own,) = (r for r in archive.records.values() if r.offset <= place.offset < r.offset + r.nbytes)
            stored_zip.update_checksum(file.fileno(), place.zip, own)
