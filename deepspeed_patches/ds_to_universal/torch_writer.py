"""Write files of torch.save without torch, from the stand-ins of `torch_file` and tensor data that comes in pieces.

No class of a file is imported: what names one is written as its name.
"""

import copyreg
import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from ckpt_patches.checksum import crc32
from ckpt_patches.torch_file import STORAGES, Global, Instance, Ordered, Size, StorageHeader, TensorHeader, stand_in
from deepspeed_patches.ds_to_universal.new_file import NewFile

PROTOCOL = 2  # torch's
ALIGNMENT = 64  # bytes; torch's, so that a file can be mapped into memory
LARGE = 1 << 30  # bytes: a record with sizes of 64 bits; the limit is 2 GiB, with some reserve
CHECKSUM_BEHIND = 8  # a record's flag
# What stands behind such a record: a signature, the checksum, and the size twice.
BEHIND, BEHIND_LARGE = struct.Struct("<4sLLL"), struct.Struct("<4sLQQ")
STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}


@contextmanager
def torch_file(file: NewFile | BinaryIO, name: str, value: Any) -> Iterator["Records"]:
    """Write a value; the caller then adds the bytes of its storages.

    `name` is torch's for the records: the file's, without its suffix.
    """
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        records = Records(archive, file, name)
        records.add("data.pkl", [pickled(value)])
        records.add("byteorder", [b"little"])
        records.add("version", [b"3\n"])
        yield records


class Records:
    """The records of a torch file that is being written."""

    def __init__(self, archive: zipfile.ZipFile, file: NewFile | BinaryIO, name: str) -> None:
        self._archive, self._file, self._name = archive, file, name

    def add_storage(self, key: str, nbytes: int, data: Iterable[Any]) -> None:
        """A storage's bytes, in pieces."""
        self.add(f"data/{key}", data, nbytes)

    def add(self, name: str, data: Iterable[Any], nbytes: int = 0) -> None:
        """A record; its checksum is taken on the way, and stands behind the data, as torch writes it.

        `ZipFile.open` would do the same, with zlib's checksum.
        """
        info, large = zipfile.ZipInfo(f"{self._name}/{name}"), nbytes >= LARGE
        info.flag_bits, info.header_offset = CHECKSUM_BEHIND, self._file.tell()
        info.extra = _padding(info.header_offset + len(info.FileHeader(large)))
        self._file.write(info.FileHeader(large))
        info.CRC = info.file_size = 0
        for piece in data:
            info.CRC = crc32(piece, info.CRC)
            info.file_size += len(piece)
            self._file.write(piece)
        info.compress_size = info.file_size
        behind = BEHIND_LARGE if large else BEHIND
        self._file.write(behind.pack(b"PK\7\x08", info.CRC, info.compress_size, info.file_size))
        self._archive.filelist.append(info)
        self._archive.start_dir = self._file.tell()


def _padding(position: int) -> bytes:
    """An extra field that moves the data to the next multiple of the alignment."""
    length = -(position + 4) % ALIGNMENT
    return b"FB" + length.to_bytes(2, "little") + bytes(length)


def pickled(value: Any) -> bytes:
    """As torch pickles it."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(pickle._Pickler):  # in Python: the one in C refuses names that it cannot import
    """Writes stand-ins as what they stand for."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, StorageHeader):
            return ("storage", stand_in("torch", STORAGE_OF[value.dtype]), value.key, "cpu", value.numel)
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, TensorHeader):
            return _made(value)
        if isinstance(value, Instance):
            return _reduced(value)
        if isinstance(value, Size):
            return stand_in("torch", "Size"), (tuple(value),)
        if isinstance(value, Ordered):
            return OrderedDict, (), getattr(value, "attributes", None), None, iter(value.items())
        return NotImplemented

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, Global):
            self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__name__}\n".encode())  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]
        else:
            super().save_global(obj, name)  # type: ignore[misc]


def _made(tensor: TensorHeader) -> tuple[Any, tuple[Any, ...]]:
    """The function of torch that makes a tensor, and its arguments."""
    if not tensor.wrapping:
        view: tuple[Any, ...] = (
            tensor.storage,
            tensor.start,
            tensor.shape,
            tensor.stride,
            tensor.requires_grad,
            OrderedDict(),
        )
        if tensor.dtype == tensor.storage.dtype:
            return stand_in("torch._utils", "_rebuild_tensor_v2"), view
        return stand_in("torch._utils", "_rebuild_tensor_v3"), (*view, stand_in("torch", tensor.dtype))
    function, rest, *inner = tensor.wrapping
    made = stand_in(*function.rsplit(".", 1))
    if not inner:
        return made, (tensor._replace(wrapping=()), *rest)
    kind, state = rest
    make, args = _made(tensor._replace(wrapping=inner[0]))
    return made, (make, kind, args, state)


def _reduced(instance: Instance) -> tuple[Any, ...]:
    """As __reduce__ gives it: how the object is made, its state, its items."""
    kind = type(instance)
    rest = (instance.state, iter(instance.items), iter(instance.pairs))
    if instance.called:
        return kind, instance.args, *rest
    return copyreg.__newobj__, (kind, *instance.args), *rest  # type: ignore[attr-defined]
