"""Read a torch.save file without torch: its structure, and the position of each tensor's bytes in the file.

Reads no tensor data, imports no module that the file names, and runs no code of it. Tensors become `TensorHeader`, and
classes become stubs that only keep what the file stores for them. A class that is not on the list is an error, as with
torch.load(weights_only=True). For a trusted file any class is allowed, and still no code runs.

The format: a zip of uncompressed records, `<name>/data.pkl` (a pickle, protocol 2, with storages as persistent ids
("storage", type, key, location, elements)), `<name>/data/<key>` (a storage's bytes), `<name>/byteorder`.
https://pytorch.org/docs/stable/notes/serialization.html#torch-save-format
"""

import math
import operator
import os
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ckpt_patches.errors import TRUST, UserError
from ckpt_patches.formats import dtypes, pickles, stored_zip
from ckpt_patches.formats.checksum import of_zeros
from ckpt_patches.formats.dtypes import ITEM_SIZE, STORAGES, UNTYPED
from ckpt_patches.formats.pickles import Function, Global, stub
from ckpt_patches.formats.pickles import Instance as Instance
from ckpt_patches.formats.pickles import NotReadError as NotReadError
from ckpt_patches.formats.ranged import open_regular
from ckpt_patches.runtime.shown import printable, shown

# First bytes of a file in torch's format before 1.6: a pickle of torch's magic number.
BEFORE_1_6 = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."

# Classes in ZeRO and Megatron checkpoints that only carry data. A listed class may be read; it is never imported.
LISTED = {
    "_codecs.encode",  # of bytes
    "__builtin__.bytes",
    *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "frozenset")),
    "_io.BytesIO",  # modules' `_extra_state`
    "argparse.Namespace",
    "collections.defaultdict",
    "collections.deque",
    "pathlib.PosixPath",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.model.enums.ModelType",
    "megatron.model.enums.PositionEmbeddingType",
    "numpy.dtype",
    "numpy.ndarray",
    *(f"numpy.{module}.multiarray.{name}" for module in ("core", "_core") for name in ("_reconstruct", "scalar")),
    "torch.Tensor",
    "torch._utils._rebuild_qtensor",
    "torch.device",
    "torch.nn.parameter.Parameter",
    *(f"torch.{dtype}" for dtype in ITEM_SIZE),
    *(f"torch.{storage}" for storage in STORAGES),
    "torch.storage.UntypedStorage",
    *(f"torch.per_{what}_affine" for what in ("tensor", "channel")),  # how a quantized tensor is scaled
    "torch.per_channel_affine_float_qparams",
}


class StorageHeader(NamedTuple):
    """A storage in a file: the bytes that one or more tensors are views of."""

    key: str  # in the file
    dtype: str  # torch's name, "uint8" for an untyped storage
    numel: int
    offset: int  # of the first byte, from the start of the file

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_SIZE[self.dtype]


class TensorHeader(NamedTuple):
    """A tensor in a file, without its data."""

    storage: StorageHeader
    dtype: str  # torch's name
    start: int  # of the view in the storage, in elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    made: Instance | None = None  # how torch rebuilds it, if it is a parameter, or of a subclass of torch.Tensor

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_known(self) -> bool:
        """Whether the dtype is known; if not, the properties below with sizes in bytes raise UnknownDtypeError."""
        return self.dtype in ITEM_SIZE

    @property
    def item_size(self) -> int:
        return dtypes.item_size(self.dtype)

    @property
    def offset(self) -> int:
        """The offset of the first element, in bytes from the start of the file."""
        return self.storage.offset + self.start * self.item_size

    @property
    def nbytes(self) -> int:
        return self.numel * self.item_size

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True


class MadeHeader(TensorHeader):
    """One that torch rebuilds with other values, which the check of a value's depth must look into."""

    __slots__ = ()


class TorchFile(NamedTuple):
    """The result of `read`."""

    path: Path
    size: int  # bytes, up to the end of what torch.save wrote
    value: Any  # dicts, lists, numbers and strings as they are; headers for tensors, stubs for classes
    storages: tuple[stored_zip.Stored, ...]  # all that are not empty, with the checksums that the file states
    root: str  # the records' folder: the stem of the name that torch.save wrote to, or "archive"

    @property
    def checksums(self) -> dict[int, int]:
        """CRC-32 by offset, of storages that are not all zeros. Two are equal if one is a copy of the other."""
        return {own.offset: own.checksum for own in self.storages if own.checksum != of_zeros(own.nbytes)}


class BadFileError(UserError):
    """A file that is damaged or incomplete, or of another format than its name says."""


class UnlistedClassError(UserError):
    """A class that is not on the list of known classes in checkpoints."""


def read(path: str | Path, *, trust: bool = False) -> TorchFile:
    """Read the structure of a torch.save file.

    `trust` allows classes that are not listed; they become stubs like the others.

    Raises:
        UnlistedClassError: the file names a class that is not listed.
        BadFileError: the file is missing, truncated, corrupt, or not a torch.save file.
        NotReadError: the file is in torch's format before 1.6, or big-endian.
    """
    path = path if isinstance(path, Path) else Path(path)  # avoids a copy: there are thousands of files
    with _as_bad_file(path), _opened(path) as descriptor:
        return _read(descriptor, path, (0, os.fstat(descriptor).st_size), trust)


def read_within(descriptor: int, path: Path, span: tuple[int, int]) -> TorchFile:
    """Read what torch.save wrote into a part of an open file. `span` is the part's first byte and length.

    Classes that are not listed become stubs. Offsets are from the start of the file. Raises the same as `read`.
    """
    with _as_bad_file(path):
        size = os.fstat(descriptor).st_size
        if sum(span) > size or min(span) < 0:
            raise BadFileError(f"{path} has {size} bytes, expected {span[1]} from {span[0]} on")
        return _read(descriptor, path, span, trust=True)


def _read(descriptor: int, path: Path, span: tuple[int, int], trust: bool) -> TorchFile:
    archive = _Archive(descriptor, path, span)
    return TorchFile(path, sum(span), _Unpickler(archive, trust).load(), archive.storages, archive.root)


def instance(value: Any, name: str) -> bool:
    """Whether a value is a stub for an object of a class with this name (without its module)."""
    return isinstance(value, Instance) and type(value).__name__ == name


def data_of(path: Path, tensor: TensorHeader) -> bytes:
    """The bytes of a small contiguous tensor.

    Raises:
        OSError: the file cannot be read.
    """
    with _opened(path) as descriptor:
        return os.pread(descriptor, tensor.nbytes, tensor.offset)


NUMBERS = {
    "float64": "<d",
    "float32": "<f",
    "float16": "<e",
    "bfloat16": "<f",  # its upper half
    "int64": "<q",
    "int32": "<i",
    "int16": "<h",
    "int8": "<b",
    "uint8": "<B",
    "bool": "<?",
}


def number(dtype: str, data: bytes) -> float | None:
    """Decode the bytes of one element as a number; None for another length or an unsupported dtype."""
    if dtype not in NUMBERS or len(data) != ITEM_SIZE[dtype]:
        return None
    data = bytes(2) + data if dtype == "bfloat16" else data
    return float(struct.unpack(NUMBERS[dtype], data)[0])


HOLDS = (dict, list, tuple, Instance)  # what can have tensors in it, and tensors, which are tuples
PARTS = (TensorHeader, StorageHeader, Instance)
LONGEST_PATH, LONGEST_PATHS = 2 * pickles.LONGEST_KEY, 256 << 20  # characters, of one of these and of all in a file


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, TensorHeader]]:
    """All tensors at any depth of a file's value, with their path in it. The value can contain itself."""
    return ((place, found) for place, found in parts_of(value, name) if isinstance(found, TensorHeader))


def parts_of(value: Any, name: str = "") -> "Iterator[tuple[str, TensorHeader | StorageHeader | Instance]]":
    """The same, and all stubs of objects, and storages that are no tensor's.

    Raises:
        NotReadError: the paths are too long: a file can name one key, and one tensor, any number of times.
    """
    seen: set[int] = set()
    whole, length = object(), 0
    left: list[tuple[str, Any, Any]] = [(name, whole, value)]  # with the path of what holds it, and its key there
    while left:
        within, key, value = left.pop()
        if not isinstance(value, TensorHeader):
            if id(value) in seen or not isinstance(value, HOLDS):
                continue
            seen.add(id(value))
        name = within if key is whole else f"{within}.{_part(key)}".strip(".")
        is_part = isinstance(value, PARTS)
        length += len(name) if is_part else 0
        if len(name) > LONGEST_PATH or length > LONGEST_PATHS:
            raise NotReadError(f"expected shorter paths of the tensors in a file, found {shown(name)}")
        if is_part:
            yield name, value
        if isinstance(value, TensorHeader):
            made = value.made.args if value.made and id(value.made) not in seen else ()
            seen.add(id(value.made))
            left += [(name, n, inner) for n, inner in enumerate(made) if type(inner) is not TensorHeader]
            continue
        if isinstance(value, Instance):
            inner = [*enumerate((value.args, value.listed, value.pairs)), ("", value.state)]
        elif isinstance(value, StorageHeader):
            inner = []
        else:
            inner = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        left += [(name, key, one) for key, one in reversed(inner) if isinstance(one, HOLDS)]


def storages_in(value: Any) -> list[StorageHeader]:
    """The storages of all tensors in a value, which can contain itself."""
    every = (own.storage if isinstance(own, TensorHeader) else own for _, own in parts_of(value))
    found = {own.key: own for own in every if isinstance(own, StorageHeader)}
    return [found[key] for key in sorted(found)]


def _part(key: Any) -> str:
    """A key as part of a path. Keys are strings, numbers, and pairs of dtypes."""
    if isinstance(key, tuple):
        return "(" + ", ".join(getattr(part, "__name__", str(part)) for part in key) + ")"
    return str(key)


# Functions of torch that rebuild tensors


def _tensor(storage: Any, start: int, shape: Any, stride: Any, requires_grad: bool = False, *_: Any) -> TensorHeader:
    """torch._utils._rebuild_tensor_v2"""
    return _checked(TensorHeader(storage, storage.dtype, start, tuple(shape), tuple(stride), requires_grad))


def _tensor_of_type(
    storage: Any, start: int, shape: Any, stride: Any, requires_grad: bool, _hooks: Any, dtype: Any, *_: Any
) -> TensorHeader:
    """torch._utils._rebuild_tensor_v3: an untyped storage and a dtype"""
    return _checked(TensorHeader(storage, dtype.__name__, start, tuple(shape), tuple(stride), requires_grad))


def _parameter(tensor: TensorHeader, *rest: Any) -> TensorHeader:
    """torch._utils._rebuild_parameter"""
    return MadeHeader(*tensor[:-1], stub("torch._utils", "_rebuild_parameter")(tensor, *rest))


def _subclass(make: Any, kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    """torch._tensor._rebuild_from_type_v2: a tensor of a subclass, or one with attributes"""
    tensor = make(*args)
    if not isinstance(tensor, TensorHeader):  # a tensor of other tensors, such as DTensor, is an object with a state
        return _with_state(tensor, state)
    return MadeHeader(*tensor[:-1], stub("torch._tensor", "_rebuild_from_type_v2")(make, kind, args, state))


def _with_state(made: Any, state: Any) -> Any:
    if not isinstance(made, Instance):
        raise pickle.UnpicklingError(f"expected a tensor or an object, found {type(made).__name__}")
    made.state = state
    return made


def _checked(tensor: TensorHeader) -> TensorHeader:
    """Check all numbers of a tensor, so that no read goes beyond its storage."""
    shape, stride = tensor.shape, tensor.stride
    if len(shape) > pickles.MOST_DIMENSIONS:
        raise pickle.UnpicklingError(f"a tensor of {len(shape)} dimensions")
    storage, numbers = tensor.storage, (tensor.start, *shape, *stride)
    if not isinstance(storage, StorageHeader) or {*map(type, numbers)} != {int} or min(numbers) < 0:
        raise pickle.UnpicklingError("a tensor of something else than a storage and numbers")
    if len(shape) != len(stride):
        raise pickle.UnpicklingError(f"a tensor of {len(shape)} dimensions with {len(stride)} strides")
    last = tensor.start + sum(map(operator.mul, shape, stride)) - sum(stride)
    same = tensor.dtype == storage.dtype and last < storage.numel
    if not same and tensor.numel and tensor.is_known and (last + 1) * tensor.item_size > storage.nbytes:
        raise pickle.UnpicklingError(f"a tensor of {last + 1} elements in a storage of {storage.nbytes} bytes")
    return tensor


_REBUILD: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_type,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._tensor._rebuild_from_type_v2": _subclass,
}
_FUNCTIONS = {name: Function(name, run) for name, run in _REBUILD.items()}
_ATOMS = pickles.ATOMS | {StorageHeader, TensorHeader}
ATTRIBUTE = ("builtins.getattr", "__builtin__.getattr")
SMALL = ("data.pkl", "version", "byteorder")  # records that are read


class _Unpickler(pickles.Unpickler):
    """Unpickles with stubs in place of classes, and headers in place of storages."""

    kept: ClassVar[Mapping[str, Any]] = _FUNCTIONS
    long = pickles.LongTuple

    def __init__(self, archive: "_Archive", trust: bool) -> None:
        super().__init__(archive.small("data.pkl"), archive.path)
        self.archive, self.trust = archive, trust
        self.storages: dict[str, StorageHeader] = {}

    def load(self) -> Any:
        value = super().load()
        pickles.check(value, self.path, _ATOMS)
        return value

    def _global(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in ATTRIBUTE and self.trust:
            return Function(full, self._attribute)
        if self.trust or full in LISTED or full in _FUNCTIONS or full in pickles.KEPT:
            return super()._global(module, name)
        raise UnlistedClassError(
            f"{self.path} holds {full}, which is not on the list of classes that checkpoints are known to "
            f"hold; look at where it comes from, and if you trust the checkpoint, use {TRUST}"
        )

    def _attribute(self, owner: Any, name: str) -> Any:
        """getattr of a class, for a method that creates an object, as in pickles of Transformer Engine's tensors"""
        if not isinstance(owner, Global) or type(name) is not str:
            return stub("builtins", "getattr")(owner, name)
        return self.find_class(owner.__module__, f"{owner.__name__}.{name}")

    def storage(self, pid: Any) -> StorageHeader:
        kind, storage, key, _location, numel = pid if type(pid) is tuple else ()
        if kind != "storage" or not isinstance(storage, Global) or type(key) is not str or type(numel) is not int:
            raise pickle.UnpicklingError("expected a storage, found something else")
        dtype = STORAGES.get(storage.__name__, UNTYPED)
        if key not in self.storages:
            offset = self.archive.data_offset(key, numel * ITEM_SIZE[dtype])
            self.storages[key] = StorageHeader(key, dtype, numel, offset)
        return self.storages[key]


class _Archive(stored_zip.Archive):
    """The records of a torch file, all in one folder. The checksums of all but the storages are verified."""

    def __init__(self, descriptor: int, path: Path, span: tuple[int, int]) -> None:
        self.path = path
        start = os.pread(descriptor, len(BEFORE_1_6), span[0])
        if start == BEFORE_1_6:
            raise NotReadError(
                f"{path} is in torch's format before 1.6, which is not read here: load it, and save it again"
            )
        if start[:4] != b"PK\3\4":
            raise BadFileError(f"{path} is {'no file of torch.save' if start else 'empty'}")
        try:
            super().__init__(descriptor, span[1], span[0])
        except stored_zip.NoDirectoryError:  # which is at the end
            raise BadFileError(f"{path} is truncated: it has no directory of records at its end") from None
        (pickled,) = [name for name in self.records if name.count("/") == 1 and name.endswith("/data.pkl")]
        self.root = pickled.removesuffix("/data.pkl")
        if not any(own.checksum for own in self.records.values()):
            raise NotReadError(
                f"{path} has no checksums, without which damage cannot be told from content: save it again"
            )
        self._small: dict[str, bytes] = {}
        for name in self.records:
            if not name.startswith(f"{self.root}/"):
                raise BadFileError(f"{path} is corrupt: its record {shown(name)} is not in the folder of the others")
            if (own := name.removeprefix(f"{self.root}/")) in SMALL:
                self._small[own] = self.read(name)
            elif not own.startswith("data/"):
                self.read(name)  # for its checksum; many, of a sparse file, are not kept in memory
        self.small("version")
        if self._small.get("byteorder", b"little") != b"little":
            raise NotReadError(f"{path} holds big-endian data, which is not read here")

    def small(self, name: str) -> bytes:
        """The data of a record that is no storage."""
        if name not in self._small:
            raise BadFileError(f"{self.path} is corrupt: it has no record {name}")
        return self._small[name]

    @property
    def storages(self) -> tuple[stored_zip.Stored, ...]:
        data = f"{self.root}/data/"
        return tuple(own for name, own in self.records.items() if own.nbytes and name.startswith(data))

    def data_offset(self, key: str, nbytes: int) -> int:
        """The offset of a storage's bytes. Checks their number."""
        found = self.records.get(f"{self.root}/data/{key}")
        if found is None or found.nbytes != nbytes:
            what = f"expected {nbytes} bytes in its record data/{key:.100}, found {found.nbytes if found else 'none'}"
            raise BadFileError(f"{self.path} is corrupt: {printable(what)}")
        return found.offset


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = open_regular(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _as_bad_file(path: Path) -> Iterator[None]:
    """Convert any error from reading a damaged file to a one-line BadFileError."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise BadFileError(f"{path}: {error.strerror or error}") from None
    except stored_zip.BadArchiveError as error:
        raise BadFileError(f"{path} is corrupt: {error}") from None
    except Exception as error:  # a crafted pickle can raise anything; none of its code runs
        raise BadFileError(
            f"{path} is corrupt, or not a torch file: {type(error).__name__}: {printable(str(error)[:500])}"
        ) from None
