"""Unpickle what an untrusted checkpoint holds: no code of it runs, and time and memory are bounded by its length.

Every class becomes a stub. Python's unpickler itself has three weaknesses, which `vetted` removes before it runs:

- It allocates memory as soon as an opcode names memo index 2,000,000,000 or the length of a bytearray.
- It hashes dict keys. A tuple of two references to a tuple of two references … has 2^n elements for the hash, which no
  signal interrupts, and a deeply nested one overflows the stack. So every tuple is passed to
  `Unpickler.persistent_load` as soon as it is made, and its elements at all depths are counted. In torch's files these
  can be sizes and tensors, of a hundred numbers each: there a tuple of many values is a `LongTuple`.
- An integer of megabytes takes minutes as text.

`pickletools` could find the opcodes, too, but takes three times as long, and there are thousands of files.
https://docs.python.org/3/library/pickletools.html
"""

import gc
import io
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar

from ckpt_patches.errors import UserError

MOST_GLOBALS, LONGEST_GLOBAL = 1000, 500  # distinct classes and functions of a pickle; characters of their names
MOST_IN_TUPLE = 4096  # elements of a tuple, at all depths
IN_SMALL = 18  # elements of a tuple of which no count is kept
MOST_ARGUMENTS = MOST_DIMENSIONS = 64
DEEPEST = 100  # levels of a value
LONGEST_KEY = 10_000  # characters
LARGEST = 256 << 20  # bytes of a pickle
MOST_REPEATED = 10_000_000  # items that a walk comes to again, as several values hold what they are in


class NotReadError(UserError):
    """A file in an unsupported format; it can be valid."""


# Bytes that follow each opcode. Opcodes that no pickle of protocol 2 or later of an object has are not listed.
_FIXED = {0: b")01NQRabesu]}(\x81\x88\x89\x8f\x90\x92\x93\x94", 1: b"Khq\x80", 2: b"M", 4: b"Jj", 8: b"G"}
# Opcodes followed by a length field of so many bytes, and then by data of this length.
_COUNTED = {**dict.fromkeys(b"CU\x8a\x8c", 1), **dict.fromkeys(b"BTX", 4), **dict.fromkeys(b"\x8d\x8e\x96", 8)}
_KEEP, _LONG, _TUPLES, _STOP = ord("r"), 0x8A, b"t\x85\x86\x87", ord(".")
_FRAME, _OF_FRAME = 0x95, 9  # bytes of it; it states the length of what follows, and is left out
LONGEST_INTEGER = 32  # bytes
_GLOBAL = rb"c[^\n]{1,%d}\n[^\n]{1,%d}\n" % (LONGEST_GLOBAL, LONGEST_GLOBAL)
_PUT = rb"r..[\x00-\x0f]\x00"  # up to a million, which takes 16 MB
# A run of opcodes that need no check. An index has millions; the limit keeps the stack small.
_ALTERNATIVES = [b"[%b]%b" % (re.escape(own), b"." * width if width else b"+") for width, own in _FIXED.items()]
_RUN = re.compile(b"(?:%b){1,4096}" % b"|".join([*_ALTERNATIVES, _PUT, _GLOBAL]), re.DOTALL)
_CHECKED = b"\x85Q"  # pass a tuple of the last value to `persistent_load`


def vetted(data: bytes) -> bytes:
    """The pickle, in which every tuple is passed to `persistent_load`, as the only element of another one.

    Raises:
        UnpicklingError: it names a memo index beyond its length, or is truncated or no pickle.
        NotReadError: it has an opcode that torch's pickles do not have, or a longer integer than `LONGEST_INTEGER`.
    """
    at, begin, size, found = 0, 0, len(data), []
    while at < size:
        if run := _RUN.match(data, at):
            at = run.end()
            continue
        opcode = data[at]
        if opcode in _TUPLES:
            at += 1
            found += (data[begin:at], _CHECKED)
            begin = at
        elif opcode == _FRAME:
            found.append(data[begin:at])
            begin = at = at + _OF_FRAME
        elif opcode == _STOP:
            return b"".join((*found, data[begin : at + 1]))
        else:
            at = _end_of(data, at)
    raise UnpicklingError(f"expected the end of a pickle, found that of its {size} bytes")


def _end_of(data: bytes, at: int) -> int:
    """The end of an opcode and its argument; beyond the end of the data if the pickle is truncated."""
    opcode = data[at]
    if opcode == _KEEP:
        if int.from_bytes(data[at + 1 : at + 5], "little") > len(data):
            raise UnpicklingError(f"at its byte {at} a pickle keeps a value at a place beyond all that it can hold")
        return at + 5
    if opcode in _COUNTED:
        begin = at + 1 + _COUNTED[opcode]
        length = int.from_bytes(data[at + 1 : begin], "little")
        if opcode == _LONG and length > LONGEST_INTEGER:
            raise NotReadError(
                f"expected an integer of at most {LONGEST_INTEGER} bytes at its byte {at}, found {length}"
            )
        return begin + length
    found = f"expected an opcode of a checkpoint's pickle at its byte {at}, found {opcode:#04x}"
    if any(opcode in own for own in _FIXED.values()):
        raise UnpicklingError(f"a pickle ends within its opcode at byte {at}")
    # Of another protocol than torch's, which a sound pickle can have.
    known = chr(opcode) in (opcode.code for opcode in pickletools.opcodes)
    raise NotReadError(found) if known else UnpicklingError(found)


# Stubs


LOOKED_AT = 1000  # items of a list that is made a set: a pickle can name one list any number of times


def _are_items(values: Any = (), *others: Any) -> bool:
    """Whether a set can have these values: of lists, dicts and sets it cannot."""
    if others or type(values) not in (list, tuple, LongTuple):
        return False
    return {*map(type, values[:LOOKED_AT])}.isdisjoint((list, dict, Ordered))


def _is_latin(text: Any = "", encoding: Any = "latin1", *others: Any) -> bool:
    return not others and type(text) is str and encoding == "latin1" and _has_bytes(text)


@lru_cache(64)
def _has_bytes(text: str) -> bool:
    """Whether each character is a byte. Cached, as a pickle can name one text any number of times."""
    try:
        return len(text.encode("latin1")) == len(text)
    except UnicodeEncodeError:
        return False


class Global(type):
    """The stub of a class or function that a file names. Calling it runs no code of the file."""

    def __call__(cls, *args: Any) -> Any:
        if (is_valid := CALLS.get(f"{cls.__module__}.{cls.__name__}")) and not is_valid(*args):
            raise UnpicklingError(f"a call of {cls.__name__} with other arguments than torch has for it")
        made: Instance = cls.__new__(cls, *args)  # type: ignore[arg-type]
        made.called = True
        return made


class Instance(metaclass=Global):
    """The stub of an object: how it was created, its state, and its items if it is a list or a dict."""

    __slots__ = ("args", "called", "listed", "pairs", "state")
    args: tuple[Any, ...]
    called: bool  # created by calling the class or function; otherwise by its __new__
    listed: Sequence[Any]  # items of a list
    pairs: Sequence[tuple[Any, Any]]  # items of a dict
    state: Any

    def __new__(cls, *args: Any) -> "Instance":
        if len(args) > MOST_ARGUMENTS:
            raise UnpicklingError(f"an object of {len(args)} arguments")
        self = object.__new__(cls)
        self.args, self.called, self.listed, self.pairs, self.state = args, False, (), (), None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.listed = self.listed or []
        self.listed.append(item)  # type: ignore[attr-defined]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs = self.pairs or []
        self.pairs.append((key, value))  # type: ignore[attr-defined]

    @property
    def fields(self) -> dict[str, Any]:
        """The object's attributes."""
        return self.state if isinstance(self.state, dict) else {}


class Ordered(OrderedDict[Any, Any]):
    """An OrderedDict. Attributes from a file are kept in `attributes`, so that they hide no methods."""

    def __setstate__(self, state: Any) -> None:
        self.attributes = state


# What the calls of functions need that torch runs and we do not, by their names.
CALLS: Mapping[str, Callable[..., bool]] = {
    "_codecs.encode": _is_latin,
    **{f"{module}.{name}": _are_items for module in ("builtins", "__builtin__") for name in ("set", "frozenset")},
}


class Size(tuple[int, ...]):
    """torch.Size."""

    __slots__ = ()

    def __new__(cls, values: Any = ()) -> "Size":
        if len(values) > MOST_DIMENSIONS:
            raise UnpicklingError(f"a size of {len(values)} dimensions")
        if not {*map(type, values)} <= {int}:  # a size of sizes of … is not counted as a tuple is
            raise UnpicklingError("a size of something else than numbers")
        return tuple.__new__(cls, values)

    def __setstate__(self, *_: Any) -> None:  # without it, a file could set attributes of this class
        raise UnpicklingError("a state for an object that has none")


class LongTuple(tuple[Any, ...]):
    """A tuple with more items than any key. Its hash is its place in memory: it can be a key any number of times."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __setstate__(self, *_: Any) -> None:
        raise UnpicklingError("a state for an object that has none")


@lru_cache(MOST_GLOBALS)
def stub(module: str, name: str) -> Any:
    """The stub for a class or function of this name."""
    return Global(name, (Instance,), {"__slots__": (), "__module__": module})


class Function:
    """A function or class of ours that a file may call. Its attributes cannot be set, so that no file can change it."""

    __slots__ = ("_run", "name")
    _run: Callable[..., Any]
    name: str  # with its module

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        object.__setattr__(self, "_run", run)
        object.__setattr__(self, "name", name)

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def __setattr__(self, *_: Any) -> None:
        raise UnpicklingError("a state for an object that has none")

    __setstate__ = __setattr__


# What is no stub in any file. Sets and bytes are calls, and so stubs, in the protocol that torch writes.
KEPT = {"torch.Size": Size, "collections.OrderedDict": Function("collections.OrderedDict", lambda: Ordered())}


class Unpickler(pickle.Unpickler):
    """Unpickles with stubs in place of all classes but those in `kept` and `KEPT`.

    Raises:
        UnpicklingError: by `load`, as all that a damaged pickle can raise.
        NotReadError: by `load`, if the value is larger or deeper than a checkpoint's.
    """

    kept: ClassVar[Mapping[str, Any]] = {}
    long: ClassVar[type[tuple[Any, ...]]] = tuple  # what a tuple becomes that has more values than a key

    def __init__(self, data: bytes, path: Path) -> None:
        if len(data) > LARGEST:
            raise NotReadError(f"{path}: expected a pickle of at most {LARGEST} bytes, found {len(data)}")
        try:
            data_to_read = vetted(data)
        except NotReadError as error:
            raise NotReadError(f"{path}: {error}") from None
        super().__init__(io.BytesIO(data_to_read), encoding="utf-8")
        self.path = path
        self._globals: dict[str, Any] = {}
        # The larger tuples' elements at all depths, by id; the values keep the ids in use.
        self._tuples: dict[int, tuple[int, Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self._globals:
            if len(self._globals) >= MOST_GLOBALS or len(full) > LONGEST_GLOBAL:
                raise NotReadError(
                    f"{self.path}: expected at most {MOST_GLOBALS} classes with names of at most {LONGEST_GLOBAL} "
                    "characters, found more"
                )
            self._globals[full] = self._global(module, name)
        return self._globals[full]

    def _global(self, module: str, name: str) -> Any:
        """What stands for a class or function."""
        full = f"{module}.{name}"
        return self.kept.get(full) or KEPT.get(full) or stub(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """What a file keeps outside of its pickle; or a tuple that `vetted` has passed, in another one."""
        if len(pid) != 1:
            return self.storage(pid)
        (value,) = pid
        if type(value) is not tuple:
            raise UnpicklingError("a persistent id that torch does not write")
        count = len(value)
        for item in value:
            if type(item) in (tuple, LongTuple) and item:
                count += self._tuples.get(id(item), (IN_SMALL,))[0]
        if count > IN_SMALL:
            if count > MOST_IN_TUPLE:
                raise NotReadError(f"{self.path}: expected a tuple of at most {MOST_IN_TUPLE} values, found {count}")
            value = self.long(value) if count > MOST_ARGUMENTS else value
            self._tuples[id(value)] = count, value
        return value

    def storage(self, pid: Any) -> Any:
        raise UnpicklingError("a storage where none can be")


# Types of values that hold no others, or none that a file can choose.
ATOMS: frozenset[Any] = frozenset({str, int, float, bool, bytes, type(None), Size, type, Global, Function})


def check(value: Any, path: Path, atoms: frozenset[Any] = ATOMS) -> None:
    """Check that a value is not too deep, does not contain itself, repeats little, and has only short keys.

    What two others hold is read once and walked through twice: a list of two references to a list of … has 2^n items.

    Raises:
        NotReadError: it is too deep, repeats more, or has other keys.
    """
    measured: dict[int, tuple[int, int]] = {}  # levels, and items of all levels, by id
    items = 0

    def measure(one: Any, level: int) -> tuple[int, int]:
        nonlocal items
        if isinstance(one, dict) and not _are_keys(one):
            raise NotReadError(f"{path}: expected a dict with strings and numbers as keys, found others")
        inner = gc.get_referents(one)
        items += len(inner)
        levels, visits = 0, len(inner)
        for part in inner:
            if type(part) not in atoms:
                if level == DEEPEST:
                    levels = DEEPEST
                    break
                deeper, more = measured.get(id(part)) or measure(part, level + 1)
                levels, visits = max(levels, deeper), visits + more
        if level + levels > DEEPEST:
            raise NotReadError(
                f"{path}: expected a value of at most {DEEPEST} levels, found more, or one that contains itself"
            )
        measured[id(one)] = levels + 1, visits
        return levels + 1, visits

    _, visits = measure(value, 1)
    if visits - items > MOST_REPEATED:
        raise NotReadError(
            f"{path}: expected at most {MOST_REPEATED} items of values that several others hold, found more"
        )


def _are_keys(keys: Any) -> bool:
    kinds = {*map(type, keys)}
    if kinds <= {str}:
        return not keys or max(map(len, keys)) <= LONGEST_KEY
    return all(map(_is_key, keys)) if kinds - {int} else True


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return len(key) <= MOST_ARGUMENTS and all(type(part) is not tuple and _is_key(part) for part in key)
    return len(key) <= LONGEST_KEY if type(key) is str else key is None or isinstance(key, (int, float, Global))
