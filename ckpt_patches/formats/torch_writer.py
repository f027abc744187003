"""Write torch.save files without torch, from the stubs of `torch_file` and tensor data in pieces.

No class of a file is imported: only its name is written.
"""

import copyreg
import io
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from ckpt_patches.formats.dtypes import STORAGES
from ckpt_patches.formats.pickles import Function, Global, Instance, LongTuple, Ordered, Size, stub
from ckpt_patches.formats.stored_zip import File, Writer
from ckpt_patches.formats.torch_file import StorageHeader, TensorHeader

PROTOCOL = 2  # torch's
STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}


@contextmanager
def torch_file(file: File, name: str, value: Any) -> Iterator["Records"]:
    """Write a value; the caller then adds the bytes of its storages.

    `name` is the records' folder: torch uses the file's name without its suffix.
    """
    records = Records(file, name, pickled(value))
    yield records
    records.archive.finish()


class Records:
    """The storages of a torch file that is being written."""

    def __init__(self, file: File, name: str, data: bytes) -> None:
        self.archive, self._name = Writer(file), name
        for own, content in (("data.pkl", data), ("byteorder", b"little"), ("version", b"3\n")):
            self.archive.add(f"{name}/{own}".encode(), [content])

    def add_storage(self, key: str, nbytes: int, data: Iterable[Any]) -> None:
        """Add a storage's bytes, in pieces."""
        self.archive.add(f"{self._name}/data/{key}".encode(), data)


class Outline:
    """A torch file without the bytes of its storages, which other code writes into their places."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytes]] = []  # by offset
        self.nbytes = 0  # of the file
        self.places: dict[str, int] = {}  # offset by storage key

    def write(self, data: Any) -> int:
        self.pieces.append((self.nbytes, bytes(data)))
        self.nbytes += len(data)
        return len(data)

    def tell(self) -> int:
        return self.nbytes

    def skip(self, nbytes: int) -> None:
        self.nbytes += nbytes


def outline(name: str, data: bytes, storages: Iterable[tuple[str, int, int]]) -> Outline:
    """The file around storages, given as key, bytes and checksum. `data` is the pickled value.

    No position depends on the checksums.
    """
    found = Outline()
    archive = Records(found, name, data).archive
    for key, nbytes, checksum in storages:
        position = archive.begin(record := f"{name}/data/{key}".encode())
        found.places[key] = found.nbytes
        found.skip(nbytes)
        archive.end(record, position, nbytes, checksum)
    archive.finish()
    return found


def pickled(value: Any) -> bytes:
    """Pickle a value as torch does."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(pickle._Pickler):  # in Python: the C version refuses names that it cannot import
    """Writes stubs as the objects that they represent."""

    dispatch: ClassVar[dict[Any, Any]] = {
        **pickle._Pickler.dispatch,
        LongTuple: pickle._Pickler.save_tuple,  # type: ignore[attr-defined]
    }

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, StorageHeader):
            return ("storage", stub("torch", STORAGE_OF[value.dtype]), value.key, "cpu", value.numel)
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, TensorHeader):
            return _reduced(value.made) if value.made else _view(value)
        if isinstance(value, Instance):
            return _reduced(value)
        if isinstance(value, Size):
            return stub("torch", "Size"), (tuple(value),)
        if isinstance(value, Ordered):
            return OrderedDict, (), getattr(value, "attributes", None), None, iter(value.items())
        return value.name if isinstance(value, Function) else NotImplemented

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, (Function, Global)):
            own = obj.name.rsplit(".", 1) if isinstance(obj, Function) else (obj.__module__, obj.__name__)
            self.write(pickle.GLOBAL + "{}\n{}\n".format(*own).encode())  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]
        else:
            super().save_global(obj, name)  # type: ignore[misc]


def _view(tensor: TensorHeader) -> tuple[Any, tuple[Any, ...]]:
    """torch's function that rebuilds a tensor, and its arguments."""
    storage, dtype, start, shape, stride, requires_grad, _ = tensor
    hooks: OrderedDict[str, Any] = OrderedDict()
    view = (storage, start, shape, stride, requires_grad, hooks)
    if dtype == storage.dtype:
        return stub("torch._utils", "_rebuild_tensor_v2"), view
    return stub("torch._utils", "_rebuild_tensor_v3"), (*view, stub("torch", dtype))


def _reduced(instance: Instance) -> tuple[Any, ...]:
    """The result of __reduce__: how the object is created, its state, its items."""
    kind = type(instance)
    rest = (instance.state, iter(instance.listed), iter(instance.pairs))
    if instance.called:
        return kind, instance.args, *rest
    return copyreg.__newobj__, (kind, *instance.args), *rest  # type: ignore[attr-defined]
