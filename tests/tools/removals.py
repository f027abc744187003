"""Remove or replace each part of a checkpoint in turn.

Each file, key and tensor is deleted, or replaced by its neighbor or by its counterpart in the next save.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_patches.formats import torch_file
from ckpt_patches.formats.torch_file import Instance, TensorHeader
from crafted_files import with_other_value
from every_checkpoint import Place, put
from torch_dist_indexes import INDEX, changed_index

DELETED, NEIGHBOR, NEXT_STEP = "deleted", "from its neighbor", "from the next step"
Key = tuple[Any, ...]
# Handled as one value: the run's configuration, and how a conversion splits parameters, which no load reads.
AS_ONE = ("ds_config", "universal_checkpoint_info")
TENSOR, CHUNK = "tensor", "chunk"  # kinds of index entries
OBJECT = "taken out.pt"  # file for the bytes of an index object


@dataclass(frozen=True)
class Change:
    """One removal or replacement."""

    how: str
    file: str  # in the checkpoint's folder, or an object of the index
    key: Key = ()  # in the file's value; empty: the complete file
    source: Key | str = ()  # the neighbor's key or file

    def __str__(self) -> str:
        where = "".join(f"[{part!r}]" for part in self.key)
        return f"{self.file}{where} {self.how}"


def changes(folder: Path, later: Path) -> Iterator[Change]:
    """All changes of a checkpoint; `later` is the run's next checkpoint."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    arrays = sorted(str(path.parent.relative_to(folder)) for path in folder.rglob(".zarray"))
    ranks = sorted(path.name for path in folder.glob("mp_rank_*") if path.is_dir())
    for file in (*files, *arrays, *ranks):
        yield Change(DELETED, file)
        if file in ranks:
            continue  # their files are among those above
        other = _like(file, files) if file in files else _alike(folder, file, arrays)
        if other and _content(folder / other) != _content(folder / file):
            yield Change(NEIGHBOR, file, source=other)
        if (later / file).exists() and _content(later / file) != _content(folder / file):
            yield Change(NEXT_STEP, file)
        if file.endswith(".pt"):
            yield from _in_file(folder / file, later / file, file)
    if (folder / INDEX).exists():
        yield from _in_index(folder, later)


def _like(file: str, files: list[str]) -> str:
    """A file whose name differs only in digits."""
    shape = "".join("0" if c.isdigit() else c for c in file)
    own = [f for f in files if "".join("0" if c.isdigit() else c for c in f) == shape and f != file]
    return own[0] if own else ""


def _alike(folder: Path, array: str, arrays: list[str]) -> str:
    """The next array with the same metadata."""
    own = (folder / array / ".zarray").read_bytes()
    at = arrays.index(array)
    found = (other for other in (*arrays[at + 1 :], *arrays[:at]) if (folder / other / ".zarray").read_bytes() == own)
    return next(found, "")


def _content(path: Path) -> Any:
    """The bytes of a file, or of each file in a folder."""
    if path.is_file():
        return path.read_bytes()
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def _in_index(folder: Path, later: Path) -> Iterator[Change]:
    """The changes of each tensor, chunk and object in the index of torch.distributed.checkpoint."""
    with changed_index(folder) as index:
        names, places = list(index.state_dict_metadata), index.storage_data
        objects = [key.fqn for key in places if key.offset is None]
    with changed_index(later) as index:
        places_then = index.storage_data
    keys, content = list(places), [_bytes(folder, place) for place in places.values()]
    for name in names:
        yield Change(DELETED, INDEX, (TENSOR, name))
    for number, own in enumerate(content):
        chunk = (CHUNK, number, keys[number].fqn)
        yield Change(DELETED, INDEX, chunk)
        others = (*range(number + 1, len(content)), *range(number))
        other = next((n for n in others if len(content[n]) == len(own) and content[n] != own), None)
        if other is not None:
            yield Change(NEIGHBOR, INDEX, chunk, (CHUNK, other))
        if keys[number] in places_then and _bytes(later, places_then[keys[number]]) != own:
            yield Change(NEXT_STEP, INDEX, chunk)
    for name in objects:
        with tempfile.TemporaryDirectory() as scratch:
            yield from _in_file(
                _taken_out(folder, name, scratch, "own"), _taken_out(later, name, scratch, "then"), name
            )


def _taken_out(folder: Path, name: str, scratch: str, called: str) -> Path:
    """Write an object's bytes to a file; return its path."""
    with changed_index(folder) as index:
        (place,) = [place for key, place in index.storage_data.items() if key.fqn == name]
    path = Path(scratch, called, OBJECT)
    path.parent.mkdir()
    path.write_bytes(_bytes(folder, place))
    return path


def _put_back(folder: Path, name: str, path: Path) -> None:
    with changed_index(folder) as index:
        (key,) = [key for key in index.storage_data if key.fqn == name]
        _append(folder, index, key, path.read_bytes())


def _append(folder: Path, index: Any, key: Any, data: bytes) -> None:
    """Append an entry's new data to its file."""
    place = index.storage_data[key]
    with open(folder / place.relative_path, "ab") as file:
        place.offset, place.length = file.tell(), file.write(data)


def _bytes(folder: Path, place: Any) -> bytes:
    with open(folder / place.relative_path, "rb") as file:
        return os.pread(file.fileno(), place.length, place.offset)


def _change_index(change: Change, folder: Path, later: Path) -> None:
    kind, which = change.key[:2]
    with changed_index(folder) as index:
        places = index.storage_data
        keys = list(places)
        if kind == TENSOR:
            del index.state_dict_metadata[which]
            for key in [key for key in keys if key.fqn == which]:
                del places[key]
        elif change.how == DELETED:
            del places[keys[which]]
        elif change.how == NEIGHBOR:
            places[keys[which]] = places[keys[int(change.source[1])]]
        else:
            with changed_index(later) as then:
                data = _bytes(later, then.storage_data[keys[which]])
            _append(folder, index, keys[which], data)


def _in_file(path: Path, later: Path, file: str) -> Iterator[Change]:
    value = torch_file.read(path, trust=True).value
    after = torch_file.read(later, trust=True).value if later.exists() else None
    for key, found in _items(value):
        yield Change(DELETED, file, key)
        if _is_container(found):
            continue
        if (source := _neighbor(value, key, found)) is not None and not _same(path, found, path, _at(value, source)):
            yield Change(NEIGHBOR, file, key, source)
        there = _at(after, key)
        if there is not None and type(there) is type(found) and not _same(path, found, later, there):
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
    """The key of the next sibling entry of the same kind."""
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


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def make(change: Change, folder: Path, later: Path) -> None:
    """Apply a change to a copy of the checkpoint."""
    path, then = folder / change.file, later / change.file
    if change.file == INDEX and change.key:
        _change_index(change, folder, later)
    elif not change.key:
        remove(path)
        if change.how != DELETED:
            other = folder / str(change.source) if change.how == NEIGHBOR else then
            (shutil.copytree if other.is_dir() else shutil.copy)(other, path)
    elif path.exists():
        _change_file(change, path, then)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            own = _taken_out(folder, change.file, scratch, "own")
            _change_file(change, own, _taken_out(later, change.file, scratch, "then"))
            _put_back(folder, change.file, own)


def _change_file(change: Change, path: Path, then: Path) -> None:
    if change.how == DELETED:
        with_other_value(path, lambda value: _delete(value, change.key))
        return
    source_path, source = (path, change.source) if change.how == NEIGHBOR else (then, change.key)
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
