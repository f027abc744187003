"""Megatron's distributed checkpoints in torch_dist: torch.distributed.checkpoint's files, with a pickled index.

`.metadata` lists each tensor's chunks and where in `__<rank>_<n>.distcp` each lies, a zip of torch.save of its own. A
flattened shard has the shape (fragments of each axis, elements of the shard), and a chunk for each data-parallel rank.
"""

import itertools
import math
import pickle
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_patches.audit import damages
from ckpt_patches.audit.checkpoint import Checkpoint, Extent, Owner, Record, Shard, Stream, item_size
from ckpt_patches.audit.damages import Finding
from ckpt_patches.audit.megatron import by_parameter, check_siblings, is_bucket, read_common
from ckpt_patches.audit.records import records
from ckpt_patches.formats import torch_file

Offsets = tuple[int, ...]


@dataclass
class Tensor:
    """A tensor of the index."""

    name: str
    dtype: str
    size: tuple[int, ...]
    whole: tuple[int, ...] | None = None  # the shape that a flattened one was made of
    chunks: dict[Offsets, tuple[int, ...]] = field(default_factory=dict)  # sizes
    places: dict[Offsets, tuple[Extent, str]] = field(default_factory=dict)  # the bytes, and the file's name

    @property
    def is_flattened(self) -> bool:
        return self.whole is not None

    def shards(self) -> dict[str, list[Offsets]]:
        """The chunks of each tensor-parallel rank's shard, in the order of their elements, by the shard's index."""
        found: dict[str, list[Offsets]] = {}
        for offsets in sorted(self.chunks):
            index = offsets[:-1] if self.is_flattened else self._index(offsets)
            found.setdefault(".".join(map(str, index)), []).append(offsets)
        return found

    def _index(self, offsets: Offsets) -> tuple[int, ...]:
        return tuple(at // size if size else 0 for at, size in zip(offsets, self.chunks[offsets], strict=True))

    def shape(self, offsets: list[Offsets]) -> tuple[int, ...]:
        """Of a shard; a flattened one's is the whole's by the number of fragments on each axis."""
        if self.whole is None:
            return self.chunks[offsets[0]]
        shape = tuple(n // parts for n, parts in zip(self.whole, self.size, strict=False))
        numel = sum(math.prod(self.chunks[at]) for at in offsets)
        return shape if math.prod(shape) == numel else (numel,)


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint; what is wrong with its files is among the findings."""
    found = Checkpoint(path, "megatron torch_dist")
    read_common(found)
    tensors = _tensors(found)
    _find_bytes(tensors, found)
    parameters = by_parameter(tensors)
    check_siblings(found, {name: {role: t.name for role, t in roles.items()} for name, roles in parameters.items()})
    for parameter, roles in parameters.items():
        found.shards += _shards(parameter, roles)
    return found


class _Unpickler(pickle.Unpickler):
    """Finds stand-ins only: nothing that the index names is imported or run."""

    def find_class(self, module: str, name: str) -> Any:
        kept = {"torch.Size": torch_file.Size, "collections.OrderedDict": torch_file.Ordered}
        return kept.get(f"{module}.{name}") or torch_file.stand_in(module, name)


def _tensors(found: Checkpoint) -> dict[str, Tensor]:
    """What the index lists, with the places where it says that the bytes are."""
    try:
        with open(found.path / ".metadata", "rb") as file:
            index = _Unpickler(file).load().fields
        tensors = {
            name: _tensor(name, entry.fields, index.get("mcore_data") or {})
            for name, entry in index["state_dict_metadata"].items()
            if "chunks" in entry.fields
        }
        for key, place in index["storage_data"].items():
            if (tensor := tensors.get(key.fields["fqn"])) is not None:
                where = place.fields
                extent = Extent(str(found.path / where["relative_path"]), where["offset"], where["length"])
                tensor.places[tuple(key.fields["offset"])] = extent, where["relative_path"]
    except Exception as error:  # a damaged pickle can raise anything; none of its code runs
        detail = f"{type(error).__name__}: {error}"
        found.findings.append(Finding(damages.BAD_METADATA, ".metadata", detail=detail))
        return {}
    return tensors


def _tensor(name: str, entry: dict[str, Any], of_megatron: dict[str, dict[str, Any]]) -> Tensor:
    dtype = entry["properties"].state[0] if isinstance(entry["properties"].state, tuple) else None
    dtype = dtype or entry["properties"].fields["dtype"]
    chunks = {tuple(c.fields["offsets"]): tuple(c.fields["sizes"]) for c in entry["chunks"]}
    whole = of_megatron.get(name, {}).get("nd_reformulated_orig_global_shape")
    return Tensor(name, dtype.__name__, tuple(entry["size"]), whole and tuple(whole), chunks)


def _find_bytes(tensors: dict[str, Tensor], found: Checkpoint) -> None:
    """Replace each chunk's place, a zip, by that of the elements in it."""
    by_file: dict[str, list[tuple[Tensor, Offsets]]] = {}
    for tensor in tensors.values():
        for offsets in tensor.chunks:
            if offsets in tensor.places:
                by_file.setdefault(tensor.places[offsets][0].path, []).append((tensor, offsets))
            else:
                found.findings.append(
                    Finding(damages.MISSING_CHUNK, tensor.name, str(offsets), detail="not in the index")
                )
    for path, chunks in sorted(by_file.items()):
        for tensor, offsets in chunks:
            place, name = tensor.places.pop(offsets)
            record = _record(place, found, tensor, offsets)
            if record:
                found.records.append(record)
                tensor.places[offsets] = Extent(path, record.offset, record.nbytes), name


def _record(place: Extent, found: Checkpoint, tensor: Tensor, offsets: Offsets) -> Record | None:
    name = Path(place.path).name
    try:
        (all_records,) = records(place.path, [(place.offset, place.nbytes)])
        record = all_records["data/0"]
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        detail = getattr(error, "strerror", None) or str(error)
        found.findings.append(Finding(damages.BAD_FILE, tensor.name, str(offsets), detail=f"{name}: {detail}"))
        return None
    expected = math.prod(tensor.chunks[offsets]) * item_size(tensor.dtype)
    if record.nbytes != expected:
        detail = f"{name}: {record.nbytes} bytes of {expected}"
        found.findings.append(Finding(damages.BAD_FILE, tensor.name, str(offsets), detail=detail))
        return None
    return record


def _shards(parameter: str, roles: dict[str, Tensor]) -> list[Shard]:
    """The arrays of a parameter by shard, those together that have the same number of elements."""
    alike: dict[tuple[str, tuple[int, ...]], dict[str, Stream]] = {}
    owners: dict[tuple[str, tuple[int, ...]], tuple[Owner, ...]] = {}
    for role, tensor in roles.items():
        for label, offsets in tensor.shards().items():
            if all(at in tensor.places for at in offsets):
                key = label, tensor.shape(offsets)
                extents = tuple(tensor.places[at][0] for at in offsets)
                alike.setdefault(key, {})[role] = Stream(tensor.name, tensor.dtype, extents)
                if len(offsets) > 1:
                    owners[key] = _owners(tensor, offsets)
    return [
        Shard(parameter, label, shape, streams, owners.get((label, shape), ()), has_rows=not is_bucket(parameter))
        for (label, shape), streams in alike.items()
    ]


def _owners(tensor: Tensor, offsets: list[Offsets]) -> tuple[Owner, ...]:
    """Which rank's file has which elements."""
    sizes = [math.prod(tensor.chunks[at]) for at in offsets]
    ends = list(itertools.accumulate(sizes))
    return tuple(
        Owner(tensor.places[at][1], end - size, end) for at, size, end in zip(offsets, sizes, ends, strict=True)
    )
