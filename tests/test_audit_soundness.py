"""No checkpoint is called whole while a tensor of it holds NaN or infinity, whatever the format.

The tensors are found by the files alone: by their headers, the index, or the folders, and not by the audit's readers.
What cannot be told is left out: chunks of buckets that may be padding (`dp_reshardable`), and padding at stage 3.
"""

import functools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from ckpt_patches.audit.audit import WHOLE, audit
from ckpt_patches.formats import stored_zip, torch_dist, torch_file
from ckpt_patches.formats.ranged import RangedFiles
from megatron_checkpoints import Configuration, written
from test_audit import converted
from test_audit_coverage import experts
from upstream import all_releases
from zero_checkpoints import trained

# By torch's name of a type: bytes of an element, NaN and infinity in them.
FLOATS = {
    "float32": (np.float32(np.nan).tobytes(), np.float32(-np.inf).tobytes()),
    "float64": (np.float64(np.nan).tobytes(), np.float64(np.inf).tobytes()),
    "bfloat16": (b"\xc0\x7f", b"\x80\x7f"),
    "float16": (np.float16(np.nan).tobytes(), np.float16(np.inf).tobytes()),
}


class Place(NamedTuple):
    """Where a tensor's elements lie."""

    path: Path
    name: str
    dtype: str
    offset: int  # bytes
    numel: int
    zip: tuple[int, int] | None = None  # the archive that its checksum stands in


def in_torch_file(path: Path) -> Iterator[Place]:
    found = torch_file.read(path, trust=True)
    for name, tensor in torch_file.tensors_in(found.value):
        yield Place(path, name, tensor.dtype, tensor.offset, tensor.numel, (0, found.size))


def in_torch_dist(folder: Path) -> Iterator[Place]:
    index = torch_dist.read_index(folder)
    with RangedFiles() as files:
        places = [(name, place) for name, place in index.objects.items()]
        places += [(name, place) for name, tensor in index.tensors.items() for place in tensor.places.values()]
        for name, place in places:
            part = torch_dist.read_place(files, folder, place)
            for inner, tensor in torch_file.tensors_in(part.value, name):
                yield Place(part.path, inner, tensor.dtype, tensor.offset, tensor.numel, place[1:])


def in_zarr(folder: Path) -> Iterator[Place]:
    for metadata in (path for path in folder.glob("*/.zarray") if path.parent.suffix != ".sync"):
        dtype = {"<f4": "float32", "<f2": "float16", "bfloat16": "bfloat16"}[json.loads(metadata.read_text())["dtype"]]
        for chunk in (file for file in metadata.parent.iterdir() if file.name[0].isdigit()):
            size = len(FLOATS[dtype][0])
            yield Place(chunk, str(chunk.relative_to(folder)), dtype, 0, chunk.stat().st_size // size)


def tensors(folder: Path) -> list[Place]:
    found = [place for path in sorted(folder.rglob("*.pt")) for place in in_torch_file(path)]
    if (folder / torch_dist.INDEX).exists():
        found += in_torch_dist(folder)
    found += in_zarr(folder)
    return [place for place in found if place.dtype in FLOATS and place.numel]


def is_padding(folder: Path, place: Place) -> bool:
    """Stage 3: whether a rank has no element of any parameter of a group; its share is all padding."""
    rank, group = (
        re.search(r"zero_pp_rank_(\d+)_.*optim", place.path.name),
        re.search(r"(?:state|fp32_flat_groups)\.(\d+)", place.name),
    )
    shapes = list(folder.glob("zero_pp_rank_0_mp_rank_00_model_states.pt"))
    if not rank or not group or not shapes or "param_groups" in place.name:
        return False
    ranks = len(list(folder.glob("*optim_states.pt")))
    numels = [
        math.prod(s) for s in torch_file.read(shapes[0], trust=True).value["param_shapes"][int(group[1])].values()
    ]
    return all(int(rank[1]) * -(-numel // ranks) >= numel for numel in numels)


def put(place: Place, value: bytes) -> None:
    """Change the first elements, and the checksum with them: as a save of such a state would have written them."""
    with open(place.path, "r+b") as file:
        os.pwrite(file.fileno(), value, place.offset)
        if place.zip is not None:
            archive = stored_zip.Archive(file.fileno(), place.zip[1], place.zip[0])
            records = [archive.stored(name) for name in archive.entries]
            (own,) = (r for r in records if r.offset <= place.offset < r.offset + r.nbytes)
            stored_zip.update_checksum(file.fileno(), place.zip, own)


def megatron(version: str, backend: str, kind: str, **more: int) -> Path:
    options = {"ranks": 2, "iterations": "3", **more}
    return written(Configuration(version=version, backend=backend, format=kind, **options)).whole[-1]  # type: ignore[arg-type]


def zero(kind: str, version: str = "0.16.2") -> Path:
    return trained(version, kind)[kind]


CHECKPOINTS: dict[str, Callable[[], Path]] = {
    "zarr": functools.partial(megatron, "0.14.0", "zarr", "fully_sharded_model_space"),
    "torch_dist": functools.partial(megatron, "0.14.0", "torch_dist", "fully_sharded_model_space"),
    "torch_dist, reshardable": functools.partial(megatron, "0.16.1", "torch_dist", "fully_reshardable"),
    "torch_dist, gathered": functools.partial(megatron, "0.16.1", "torch_dist", "dp_zero_gather_scatter"),
    "torch_dist, tensor parallel": functools.partial(
        megatron, "0.16.1", "torch_dist", "fully_reshardable", ranks=4, tp=2
    ),
    "torch": functools.partial(megatron, "0.14.0", "torch", "fully_sharded_model_space"),
    "stage 2": functools.partial(zero, "stage2"),
    "stage 3": functools.partial(zero, "stage3"),
    "stage 3, groups": functools.partial(zero, "stage3_groups", "0.19.8"),
    "experts": functools.partial(experts, 1),
    "universal": lambda: converted() / "stage2",
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_nan_or_infinity_in_one_element_of_any_tensor_is_not_called_whole(name: str, tmp_path: Path) -> None:
    """The first element of each; at stage 3 all, as the first can be padding."""
    folder = Path(shutil.copytree(CHECKPOINTS[name](), tmp_path / "checkpoint"))
    report = audit(folder, workers=1)
    assert (report.verdict, [f for f in report.findings if f.kind.severity != "note"]) == (WHOLE, [])
    places = [place for place in tensors(folder) if not is_padding(folder, place)]
    assert len(places) > 10
    missed = []
    for number, place in enumerate(places if all_releases() else places[:: len(places) // 8]):
        value = FLOATS[place.dtype][number % 2]
        before = place.path.read_bytes()
        put(place, value * place.numel if "stage 3" in name else value)
        if audit(folder, workers=1).verdict == WHOLE:
            missed.append(f"{place.path.name} {place.name}")
        place.path.write_bytes(before)
    assert missed == []
