"""Everything in a checkpoint, taken away in turn.

Each file, key and tensor is deleted, or replaced by what lies beside it or by what the next save has in its place.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_patches.formats import torch_file
from ckpt_patches.formats.torch_file import Instance, TensorHeader
from crafted_files import with_other_value
from every_checkpoint import Place, put
from shared import remove
from torch_dist_indexes import INDEX, changed_index

DELETED, NEIGHBOR, NEXT_STEP = "deleted", "from its neighbor", "from the next step"
Key = tuple[Any, ...]
# What is not looked into: the run's configuration, which no load reads.
AS_ONE = ("ds_config",)
TENSOR, CHUNK = "tensor", "chunk"  # in an index


@dataclass(frozen=True)
class Change:
    """One of them."""

    how: str
    file: str  # in the checkpoint's folder
    key: Key = ()  # in the file's value; empty: the whole file
    source: Key | str = ()  # of a neighbor: its key or file

    def __str__(self) -> str:
        where = "".join(f"[{part!r}]" for part in self.key)
        return f"{self.file}{where} {self.how}"


def changes(folder: Path, later: Path) -> Iterator[Change]:
    """All of a checkpoint; `later` is the next one of the run."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    arrays = sorted(str(path.parent.relative_to(folder)) for path in folder.rglob(".zarray"))
    for file in (*files, *arrays):
        yield Change(DELETED, file)
        other = _like(file, files) if file in files else _alike(folder, file, arrays)
        if other and _content(folder / other) != _content(folder / file):
            yield Change(NEIGHBOR, file, source=other)
        if (later / file).exists() and _content(later / file) != _content(folder / file):
            yield Change(NEXT_STEP, file)
        if file.endswith(".pt"):
            yield from _in_file(folder, later, file)
    if (folder / INDEX).exists():
        yield from _in_index(folder)


def _like(file: str, files: list[str]) -> str:
    """The file beside this one whose name differs in its numbers alone."""
    shape = "".join("0" if c.isdigit() else c for c in file)
    own = [f for f in files if "".join("0" if c.isdigit() else c for c in f) == shape and f != file]
    return own[0] if own else ""


def _alike(folder: Path, array: str, arrays: list[str]) -> str:
    """The next array of the same shape and type."""
    own = (folder / array / ".zarray").read_bytes()
    at = arrays.index(array)
    found = (other for other in (*arrays[at + 1 :], *arrays[:at]) if (folder / other / ".zarray").read_bytes() == own)
    return next(found, "")


def _content(path: Path) -> Any:
    """Of a file, or of all in a folder."""
    if path.is_file():
        return path.read_bytes()
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def _in_index(folder: Path) -> Iterator[Change]:
    """Each tensor and chunk that the index of torch.distributed.checkpoint has."""
    with changed_index(folder) as index:
        tensors, places = list(index.state_dict_metadata), list(index.storage_data.values())
    content = [_bytes(folder, place) for place in places]
    for name in tensors:
        yield Change(DELETED, INDEX, (TENSOR, name))
    for number, own in enumerate(content):
        yield Change(DELETED, INDEX, (CHUNK, number))
        others = (*range(number + 1, len(content)), *range(number))
        other = next((n for n in others if len(content[n]) == len(own) and content[n] != own), None)
        if other is not None:
            yield Change(NEIGHBOR, INDEX, (CHUNK, number), (CHUNK, other))


def _bytes(folder: Path, place: Any) -> bytes:
    with open(folder / place.relative_path, "rb") as file:
        return os.pread(file.fileno(), place.length, place.offset)


def _change_index(change: Change, folder: Path) -> None:
    kind, which = change.key
    with changed_index(folder) as index:
        places = index.storage_data
        keys = list(places)
        if kind == TENSOR:
            del index.state_dict_metadata[which]
            for key in [key for key in keys if key.fqn == which]:
                del places[key]
        elif change.how == DELETED:
            del places[keys[which]]
        else:
            places[keys[which]] = places[keys[int(change.source[1])]]


def _in_file(folder: Path, later: Path, file: str) -> Iterator[Change]:
    value = torch_file.read(folder / file, trust=True).value
    after = torch_file.read(later / file, trust=True).value if (later / file).exists() else None
    for key, found in _items(value):
        yield Change(DELETED, file, key)
        if _is_container(found):
            continue
        if (source := _neighbor(value, key, found)) is not None and not _same(
            folder / file, found, folder / file, _at(value, source)
        ):
            yield Change(NEIGHBOR, file, key, source)
        there = _at(after, key)
        if there is not None and type(there) is type(found) and not _same(folder / file, found, later / file, there):
            yield Change(NEXT_STEP, file, key)


def _items(value: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every entry of every dictionary and list, at any depth."""
    held = value.fields if isinstance(value, Instance) else value
    if isinstance(held, dict):
        entries: Any = held.items()
    elif isinstance(held, list):
        entries = enumerate(held)
    else:
        return
    for name, item in list(entries):
        yield (*key, name), item
        if name not in AS_ONE:
            yield from _items(item, (*key, name))


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, Instance)) and not isinstance(value, TensorHeader)


def _at(value: Any, key: Key) -> Any:
    for part in key:
        value = value.fields if isinstance(value, Instance) else value
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _neighbor(value: Any, key: Key, found: Any) -> Key | None:
    """The next entry of the same kind beside it."""
    holder = _at(value, key[:-1])
    names = (
        list(holder.fields if isinstance(holder, Instance) else holder)
        if not isinstance(holder, list)
        else list(range(len(holder)))
    )
    at = names.index(key[-1])
    for name in (*names[at + 1 :], *names[:at]):
        other = _at(value, (*key[:-1], name))
        if type(other) is type(found) and (
            not isinstance(found, TensorHeader) or (other.numel, other.dtype) == (found.numel, found.dtype)
        ):
            return (*key[:-1], name)
    return None


def _same(path: Path, one: Any, other_path: Path, other: Any) -> bool:
    if isinstance(one, TensorHeader):
        return one.shape == other.shape and torch_file.data_of(path, one) == torch_file.data_of(other_path, other)
    return bool(one == other)


def make(change: Change, folder: Path, later: Path) -> None:
    """Change a copy of the checkpoint."""
    path = folder / change.file
    if change.file == INDEX and change.key:
        _change_index(change, folder)
        return
    if not change.key:
        remove(path)
        if change.how != DELETED:
            other = folder / str(change.source) if change.how == NEIGHBOR else later / change.file
            (shutil.copytree if other.is_dir() else shutil.copy)(other, path)
        return
    if change.how == DELETED:
        with_other_value(path, lambda value: _delete(value, change.key))
        return
    source_path, source = (path, change.source) if change.how == NEIGHBOR else (later / change.file, change.key)
    other = _at(torch_file.read(source_path, trust=True).value, tuple(source))
    own = _at(torch_file.read(path, trust=True).value, change.key)
    if isinstance(own, TensorHeader):
        place = Place(path, "", own.dtype, own.offset, own.numel, (0, os.path.getsize(path)))
        put(place, torch_file.data_of(source_path, other))
    else:
        with_other_value(path, lambda value: _set(value, change.key, other))


def _holder(value: Any, key: Key) -> Any:
    holder = _at(value, key[:-1])
    return holder.fields if isinstance(holder, Instance) else holder


def _delete(value: Any, key: Key) -> None:
    del _holder(value, key)[key[-1]]


def _set(value: Any, key: Key, new: Any) -> None:
    _holder(value, key)[key[-1]] = new
