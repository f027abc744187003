"""The reader of torch files needs no torch and no tensor data, and runs nothing of a file."""

import argparse
import io
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_patches.errors import UserError
from ckpt_patches.formats import pickles, stored_zip, torch_dist, torch_file, torch_writer, zero_folder
from ckpt_patches.formats.checksum import of_zeros
from ckpt_patches.formats.dtypes import ITEM_SIZE, UnknownDtypeError
from ckpt_patches.formats.torch_file import (
    BadFileError,
    Instance,
    NotReadError,
    StorageHeader,
    TensorHeader,
    UnlistedClassError,
)
from crafted_files import with_other_name
from upstream import all_releases


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.pt"


def saved(value: Any, path: Path) -> Any:
    torch.save(value, path)
    return torch_file.read(path).value


def data(path: Path, tensor: TensorHeader | StorageHeader) -> bytes:
    with open(path, "rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.nbytes)


BASE = torch.arange(24, dtype=torch.float32)
TENSORS = {
    "float32": BASE.view(4, 6).clone(),
    "bfloat16": BASE.bfloat16(),
    "float16": BASE.half(),
    "float64": BASE.double(),
    "float8": BASE.to(torch.float8_e4m3fn),
    "int64": BASE.long(),
    "bool": BASE.bool(),
    "complex": BASE.to(torch.complex64),
    "step": torch.tensor(10.0),
    "empty": torch.empty(0, 3),
    "view": BASE[5:11],
    "parameter": torch.nn.Parameter(BASE.clone()),
}


def can_be_saved(dtype: torch.dtype, path: Path) -> bool:
    """Whether torch can save the dtype: sub-byte dtypes have no name in a file."""
    if str(dtype).startswith("torch.q"):
        return True
    try:
        torch.save(torch.empty(3, dtype=dtype), path)
    except KeyError:
        return False
    return True


DTYPES = sorted({str(found) for found in vars(torch).values() if isinstance(found, torch.dtype)})


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_of_elements_that_torch_can_save_is_known_by_its_size(name: str, path: Path) -> None:
    dtype = getattr(torch, name.removeprefix("torch."))
    if not can_be_saved(dtype, path):
        assert name.removeprefix("torch.") not in ITEM_SIZE
        return
    if name.startswith("torch.q"):
        tensor = torch.quantize_per_tensor(torch.arange(7.0), 0.5, 1, dtype)
    else:
        tensor = torch.arange(7 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    stored = bytes(tensor.untyped_storage().tolist())
    header = saved(tensor, path)
    if name.startswith("torch.q"):
        storage = header.args[0]
        assert (f"torch.{storage.dtype}", storage.nbytes, data(path, storage)) == (name, len(stored), stored)
        return
    assert (f"torch.{header.dtype}", header.numel, header.is_known) == (name, 7, True)
    assert data(path, header) == stored[: header.nbytes]
    assert header.nbytes == len(stored)


def test_a_quantized_tensor_keeps_its_scales(path: Path) -> None:
    scales, zeros = torch.tensor([0.5, 0.25], dtype=torch.float64), torch.tensor([0, 1])
    found = saved(torch.quantize_per_channel(BASE.view(2, 12), scales, zeros, 0, torch.qint8), path)
    assert torch_file.instance(found, "_rebuild_qtensor")
    how, found, *_ = found.args[4]
    assert how.__name__ == "per_channel_affine"
    assert data(path, found) == scales.numpy().tobytes()


def test_an_unknown_type_of_elements_is_not_corrupt(path: Path) -> None:
    """An unknown dtype, as from a newer torch, leaves the other tensors readable."""
    torch.save({"new": BASE.to(torch.float8_e8m0fnu), "other": BASE}, path)
    found = torch_file.read(with_other_name(path, b"float8_e8m0fnu", b"float9_e9m0fnu"), trust=True).value
    assert data(path, found["other"]) == BASE.numpy().tobytes()
    assert (found["new"].dtype, found["new"].shape, found["new"].is_known) == ("float9_e9m0fnu", (24,), False)
    for size in ("item_size", "offset", "nbytes"):
        with pytest.raises(UnknownDtypeError, match=r"found torch\.float9_e9m0fnu"):
            getattr(found["new"], size)


@pytest.mark.parametrize("name", TENSORS)
def test_a_header_says_where_the_data_is(name: str, path: Path) -> None:
    tensor = TENSORS[name]
    header = saved({"tensor": tensor}, path)["tensor"]
    assert (header.shape, header.stride) == (tuple(tensor.shape), tensor.stride())
    assert (f"torch.{header.dtype}", header.numel) == (str(tensor.dtype), tensor.numel())
    assert bool(header.made) == isinstance(tensor, torch.nn.Parameter)
    assert header.is_contiguous
    raw = tensor.detach().contiguous().flatten().view(torch.uint8) if tensor.dim() else tensor[None].view(torch.uint8)
    assert data(path, header) == raw.numpy().tobytes()


def test_views_share_a_storage_as_they_did(path: Path) -> None:
    one, other, transposed = saved([BASE[:4], BASE[8:], BASE.view(4, 6).t()], path)
    assert one.storage == other.storage
    assert (one.start, other.start, transposed.is_contiguous) == (0, 8, False)


def test_a_tensor_with_attributes(path: Path) -> None:
    """A tensor's attributes are read, as on DeepSpeed's partitions at stage 3."""
    tensor = BASE.clone()
    tensor.ds_id = "0_6"
    header = saved(tensor, path)
    _, kind, _, state = header.made.args
    assert torch_file.instance(header.made, "_rebuild_from_type_v2")
    assert (header.shape, kind.__name__, state) == ((24,), "Tensor", {"ds_id": "0_6"})


def test_plain_values_come_out_as_they_are(path: Path) -> None:
    value = {"list": [1, 2.5, None, True], "tuple": (1, "a"), 3: "b", "big": 2**70}
    found = saved(OrderedDict(value), path)
    assert found == value
    assert isinstance(found, OrderedDict)
    found = saved([b"bytes", {1, 2}], path)
    assert [own.args for own in found] == [("bytes", "latin1"), ([1, 2],)]


def test_classes_come_out_as_stubs(path: Path) -> None:
    found = saved({"args": argparse.Namespace(tp=2), "size": torch.Size([2, 3]), "dtype": torch.bfloat16}, path)
    assert torch_file.instance(found["args"], "Namespace")
    assert found["args"].fields == {"tp": 2}
    assert found["size"] == (2, 3)
    assert (found["dtype"].__module__, found["dtype"].__name__) == ("torch", "bfloat16")


def test_neither_torch_nor_a_class_of_the_file_is_imported(path: Path) -> None:
    torch.save({"tensor": BASE, "args": argparse.Namespace()}, path)
    program = (
        "import sys; from ckpt_patches.formats import torch_file; torch_file.read(sys.argv[1]);"
        "print(sorted({'torch', 'numpy', 'argparse', 'deepspeed'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Unlisted classes and malicious files


class Unknown:
    pass


def test_a_class_that_is_not_listed(path: Path) -> None:
    torch.save({"extra": Unknown()}, path)
    with pytest.raises(UnlistedClassError, match=r"state\.pt holds \S*Unknown, which is not on .* --trust-checkpoint"):
        torch_file.read(path)
    found = torch_file.read(path, trust=True).value["extra"]
    assert isinstance(found, Instance)
    assert not isinstance(found, Unknown)


class Call:
    """Pickled as a call of a function; `state` is set on the result."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.reduced = (function, args, state) if state is not None else (function, args)

    def __reduce__(self) -> Any:
        return self.reduced


def write(path: Path, records: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return path


def with_pickle(path: Path, pickled: bytes) -> Path:
    return write(path, {"state/data.pkl": pickled, "state/data/0": bytes(96), "state/version": b"3\n"})


def touched(path: Path) -> bool:
    """Whether the side effect that no malicious file may have has happened."""
    return (path.parent / "touched").exists()


def evil_calls(path: Path) -> dict[str, Any]:
    command = f"touch {path.parent / 'touched'}"
    return {
        "system": Call(os.system, command),
        "eval": Call(eval, f"__import__('os').system({command!r})"),
        "popen": Call(subprocess.Popen, ["touch", str(path.parent / "touched")]),
        "getattr": Call(getattr, Call(__import__, "os"), "system"),
        "in a list": [1, {"a": (Call(os.system, command),)}],
        "as a key": {Call(os.system, command): 1},
        "behind a listed class": Call(argparse.Namespace, Call(os.system, command)),
        "state of a listed class": Call(argparse.Namespace, state={"a": Call(os.system, command)}),
        "loader": Call(torch.load, str(path)),
        "hook": Call(torch._utils._rebuild_tensor_v2, Call(os.system, command), 0, (), (), False, OrderedDict()),
    }


@pytest.mark.parametrize("name", evil_calls(Path("x")))
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_call_of_a_file_is_never_made(name: str, protocol: int, path: Path) -> None:
    """Even a trusted file runs nothing; and weights_only=True refuses what is refused here."""
    with_pickle(path, pickle.dumps({"x": evil_calls(path)[name]}, protocol=protocol))
    with pytest.raises(UserError):
        torch_file.read(path)
    if protocol == 2:
        with pytest.raises(pickle.UnpicklingError):
            torch.load(path, weights_only=True)
    with suppress(UserError):
        torch_file.read(path, trust=True)
    assert not touched(path)


GLOBALS = {
    "a dotted name": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R.",
    "a name through a listed module": b"\x80\x04\x8c\x05torch\x8c\x0fserialization.os\x93.",
    "posix": b"cposix\nsystem\n(S'touch touched'\ntR.",
    "INST": b"(S'touch touched'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'touch touched'\no.",
    "an extension": b"\x80\x02\x82\x01.",
    "a class of this reader": b"cckpt_patches.torch_file\nread\n(S'x'\ntR.",
    "BUILD on torch's function": b"ctorch._utils\n_rebuild_tensor_v2\n}S'_run'\nNsb.",
    "slots of torch's function": b"ctorch._utils\n_rebuild_tensor_v2\n(N}S'_run'\nNstb.",
    "BUILD on a class": b"cargparse\nNamespace\n}S'__new__'\nNsb.",
    "slots of a class": b"ccollections\nOrderedDict\n(N}S'__init__'\nNstb.",
    "slots of torch.Size": b"ctorch\nSize\n(N}S'marker'\nNstb.",
    "BUILD on a list": b"(l}S'a'\nNsb.",
    "a memo that is not there": b"h\x07.",
    "a string that is longer than the file": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "nothing": b"",
    "no end": b"\x80\x02}",
    "noise": bytes(range(256)),
}


@pytest.mark.parametrize("name", GLOBALS)
def test_a_crafted_pickle_is_one_clear_line(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    with_pickle(path, GLOBALS[name])
    with pytest.raises(UserError, match=str(path)):
        torch_file.read(path)
    with suppress(UserError):
        torch_file.read(path, trust=True)
    assert not touched(path)
    # The reader's own state is unchanged.
    assert torch_file.read(save_tensor(path)).value.shape == (24,)
    assert pickles.Ordered(a=1) == {"a": 1}


def text(value: str | bytes) -> bytes:
    encoded = value if isinstance(value, bytes) else value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def kept(index: int) -> bytes:
    return b"r" + struct.pack("<I", index)


def again(index: int) -> bytes:
    return b"j" + struct.pack("<I", index)


def key(value: bytes) -> bytes:
    return b"}" + value + b"K\x01s"


def doubled(levels: int) -> bytes:
    """A tuple of two references to a tuple of two references to …"""
    pairs = (b"0" + again(n) * 2 + b"\x86" + kept(n + 1) for n in range(levels))
    return b"N\x85" + kept(0) + b"".join(pairs)


def copies(function: bytes, value: bytes, arguments: bytes, times: int) -> bytes:
    """Calls of a function, all with the same value."""
    return (
        value + kept(7) + b"0" + function + kept(8) + b"0](" + (again(8) + again(7) + arguments + b"R") * times + b"e"
    )


NUMBERS = b"(" + b"".join(b"J" + struct.pack("<i", number) for number in range(20_000))
GROWING = {
    "bytes": copies(b"c_codecs\nencode\n", text("x" * 1_000_000), text("latin1") + b"\x86", 20_000),
    "a frozenset of a list": copies(b"cbuiltins\nfrozenset\n", b"]" + NUMBERS + b"e", b"\x85", 3000),
    "a set of a list": copies(b"cbuiltins\nset\n", b"]" + NUMBERS + b"e", b"\x85", 3000),
    "a frozenset of a tuple": copies(b"cbuiltins\nfrozenset\n", NUMBERS + b"t", b"\x85", 3000),
    "a size": copies(b"ctorch\nSize\n", b"(" + b"K\x01" * 4000 + b"t", b"\x85", 300_000),
    "a size of a list": copies(b"ctorch\nSize\n", b"](" + b"K\x01" * 200_000 + b"e", b"\x85", 3000),
    "arguments of an object": copies(b"ca\nb\n", b"(" + b"K\x01" * 4000 + b"t", b"", 300_000),
    "an ordered dict": copies(b"ccollections\nOrderedDict\n", b"}(" + b"".join(
        b"J" + struct.pack("<i", number) + b"N" for number in range(100_000)) + b"u", b"\x85", 3000),
    "many names": b"(" + b"".join(b"ca\nb%d\n" % number for number in range(300_000)) + b"t",
    "names of names": b"cbuiltins\ngetattr\n" + kept(0) + b"ca\nb\n" + kept(1)
    + b"".join(again(0) + again(1) + text("x" * 400) + b"\x86R" + kept(1) for _ in range(2000)),
    "a name of a megabyte": b"c" + b"x" * 1_000_000 + b"\ny\n",
}  # fmt: skip
SLOW = {
    "a value at place two thousand million": b"Nr\x00\x00\x00\x77",
    "the same behind all that has a length": b"\x8c\x01a\x8cB" + bytes(66) + b"X\x02\x00\x00\x00ab"
    b"\x8d\x01\x00\x00\x00\x00\x00\x00\x00aC\x01aB\x01\x00\x00\x00a\x8a\x01acbuiltins\nset\nG"
    + bytes(8)
    + b"r\x00\x00\x00\x77",
    "a bytearray that does not follow": b"\x96\x00\x00\x00\x00\x10\x00\x00\x00",
    "a key of 2^60": key(doubled(60)),
    "a long key of long sizes, ten thousand times": b"}ctorch\nSize\n(" + b"K\x01" * 64 + b"t\x85R" + kept(1) + b"0("
        + again(1) * 4000 + b"t" + kept(2) + b"0" + (b"(" + (again(2) + b"N") * 1000 + b"u") * 10,
    "lists of 2^60": b"]" + kept(0) + b"".join(b"0](" + again(n) * 2 + b"e" + kept(n + 1) for n in range(60)),
    "the same by DUP": key(b")" + b"2\x86" * 60),
    "a key that is nested": key(b")" + b"\x85" * 300_000),
    "a set item of 2^60": b"cbuiltins\nset\n]" + doubled(60) + b"a\x85R",
    "an item of 2^60 of a set's opcode": b"\x8f(" + doubled(60) + b"\x90",
    "a size of sizes": b"ctorch\nSize\n" + kept(0) + b"0" + key(
        b")" + kept(1) + b"".join(b"0" + again(0) + again(1) * 2 + b"\x86\x85R" + kept(1) for _ in range(60))),
    "sets of sets": b"cbuiltins\nfrozenset\n" + kept(0) + b"0" + b"".join(b"(" + b")" + kept(1) + b"".join(
        b"0" + again(0) + b"](" + again(1) + b"K\x00\x86" + again(1) + b"K\x01\x86e\x85R" + kept(1)
        for _ in range(60)) + b"t" for _ in range(2)) + b"\x86" + kept(2) + b"0" + key(again(2)),
    "tensors of tensors": b"ctorch._utils\n_rebuild_parameter\n" + kept(0) + b"0ctorch._utils\n_rebuild_tensor_v2\n("
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
        + b"K\x18tQK\x00))\x89NtR" + kept(1)
        + b"".join(b"0" + again(0) + again(1) + again(1) * 2 + b"\x86\x86R" + kept(1) for _ in range(60))
        + kept(3) + b"0" + key(again(3)),
    "a storage's kind of 2^60": b"(" + doubled(60) + b"NNNNtQ",
    "an encoding of 2^60": b"c_codecs\nencode\n" + text("a") + doubled(60) + b"\x86R",
    "an attribute of 2^60": b"cbuiltins\ngetattr\nca\nb\n" + doubled(60) + b"\x86R",
    "nested lists": b"]" * 200_000 + b"a" * 199_999,
    "nested tuples": b")" + b"\x85" * 200_000,
    "nested dicts": b"}" + b"K\x00}" * 100_000 + b"s" * 100_000,
    "nested tensors": b"ctorch._tensor\n_rebuild_from_type_v2\n" + kept(0) + b"ca\nb\n" + kept(1)
    + b"".join(b"0" + again(0) + b"(" + again(0) + b"Nca\nb\n)R" + kept(2) + b"0" + again(1) + b"N"
               + again(1) + b"\x85NtR" + kept(1) for _ in range(3)) + b"]" * 150 + b"a" * 149,
    "a list that contains itself": b"]" + kept(0) + again(0) + b"a",
    "a dict that contains itself": b"}" + kept(0) + b"N" + again(0) + b"s",
    "an integer of 100 KB": b"\x8b" + struct.pack("<i", 100_000) + bytes(100_000),
    "an integer of 100 KB as a key": key(b"\x8b" + struct.pack("<i", 100_000) + bytes(100_000)),
    "an integer of 200 bytes": b"\x8a\xc8" + bytes(200),
    "a key of a megabyte": key(text("x" * 1_000_000)),
    "a key that is an object": key(b"ctorch\nTensor\n)R"),
    "a key of keys": key(b"N\x85\x85\x85"),
}  # fmt: skip
BOMBS = {**GROWING, **SLOW}
KEPT = ("bytes",)  # calls that are not made
MEMORY = """
import resource, sys, time
from ckpt_patches.formats import pickles, stored_zip, torch_dist, torch_file, zero_folder
from ckpt_patches.errors import UserError
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
try:
    torch_file.read(sys.argv[1], trust=True)
    print(sys.argv[1])
except UserError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, time.process_time() - begin)
"""


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_cannot_ask_for_more_than_its_length(name: str, path: Path) -> None:
    """Each is refused, or kept as calls, in less than a second of one processor, and with less than 200 MB."""
    with_pickle(path, b"\x80\x04" + BOMBS[name] + b".")
    done = subprocess.run([sys.executable, "-c", MEMORY, path], capture_output=True, text=True, check=True, timeout=60)
    message, used = done.stdout.splitlines()
    assert message.startswith(str(path))
    assert (message == str(path)) == (name in KEPT)
    assert len(message) < 1000
    grown, seconds = map(float, used.split())
    assert grown < 200 << 10  # KiB
    assert seconds < (1.0 if len(BOMBS[name]) < 1_000_000 else 3.0)


@pytest.mark.parametrize(
    ("levels", "tensors", "most"), [(3, 1, torch_file.LONGEST_PATHS), (1, 100, 200_000)], ids=["one", "all"]
)
def test_a_key_of_every_path_is_not_repeated(
    levels: int, tensors: int, most: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 19 KB, a tensor can be named three thousand times below ninety long keys: 2.7 GB of paths."""
    monkeypatch.setattr(torch_file, "LONGEST_PATHS", most)
    value: Any = [BASE] * tensors
    for _ in range(levels):
        value = {"k" * 9000: value}
    with pytest.raises(NotReadError, match="expected shorter paths of the tensors in a file, found 'kkk"):
        list(torch_file.tensors_in(saved(value, path)))


def test_a_long_tuple_is_read_and_written(path: Path) -> None:
    value = {"numbers": tuple(range(3000)), "sizes": (torch.Size((2, 3)),) * 3000, "key": {(1,) * 64: (1,) * 65}}
    found = saved({**value, "tensors": tuple(BASE.clone() for _ in range(1000))}, path)
    assert {own.shape for own in found.pop("tensors")} == {(24,)}
    assert found == value
    assert torch.load(with_pickle(path, torch_writer.pickled(found)), weights_only=False) == value
    with pytest.raises(NotReadError, match="expected a dict with strings and numbers as keys"):
        saved({(1,) * 65: 1}, path)


def test_records_that_are_not_read_are_not_kept(path: Path) -> None:
    """A sparse file has them without any bytes on the disk."""
    with open(path, "wb") as file:
        writer = stored_zip.Writer(file)
        for own, content in ((b"data.pkl", b"\x80\x02}."), (b"version", b"3\n"), (b"byteorder", b"little")):
            writer.add(b"state/" + own, [content])
        for number in range(8):  # more than the memory of this process, with which the other one begins
            position = writer.begin(name := b"state/%d" % number)
            file.seek(200 << 20, os.SEEK_CUR)
            writer.end(name, position, 200 << 20, of_zeros(200 << 20))
        writer.finish()
    done = subprocess.run([sys.executable, "-c", MEMORY, path], capture_output=True, text=True, check=True, timeout=60)
    assert float(done.stdout.split()[1]) < 200 << 10  # KiB


def test_a_parameter_that_two_others_hold_is_visited_once(path: Path) -> None:
    """Each of fifteen levels has the one before it twice."""
    pickled = b"ctorch._utils\n_rebuild_parameter\n" + kept(0) + b"0ctorch._utils\n_rebuild_tensor_v2\n(("
    pickled += (
        text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x18tQK\x00))\x89NtR" + kept(1)
    )
    pickled += b"".join(b"0" + again(0) + again(1) * 2 + b"N\x87R" + kept(1) for _ in range(15))
    read = torch_file.read(with_pickle(path, b"\x80\x04" + pickled + b"."))
    assert 15 <= len(list(torch_file.tensors_in(read.value))) < 100


@pytest.mark.parametrize(
    "call",
    [
        b"cbuiltins\nset\n]]K\x01aa\x85R",
        b"cbuiltins\nset\nK\x05\x85R",
        b"c_codecs\nencode\n" + text("\u00e9") + text("ascii") + b"\x86R",
        b"c_codecs\nencode\n" + text("\u0100") + text("latin1") + b"\x86R",
    ],
    ids=["a set of a list", "a set of a number", "ascii", "no byte"],
)
def test_a_call_that_torch_cannot_make_is_refused(call: bytes, path: Path) -> None:
    with_pickle(path, b"\x80\x04" + call + b".")
    with pytest.raises(Exception, match=r"."):
        torch.load(path, weights_only=False)
    with pytest.raises(BadFileError, match="other arguments than torch has for it"):
        torch_file.read(path)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_of_python_is_read_as_it_is(protocol: int, tmp_path: Path) -> None:
    big: tuple[Any, ...] = (3, tuple(range(625)), None)  # of Python's random state
    shared: tuple[Any, ...] = ("a", ("b", 1))
    value: list[Any] = [
        {
            "a": [1, 2.5, 2**70, -1, 300, 70000, None, True],
            "b": (b"x" * 300 if protocol > 2 else "", "y" * 300, {3} if protocol > 3 else None),
        },
        [big, shared, shared, {shared[1]: 1}, {(1, 2): 3}],
        [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((1, 2),), ((1,), (2, 3)), "x" * 63, "x" * 64, "x" * 256],
    ]
    value += [[index, str(index), (index, index), (str(index),)] for index in range(30_000)] + [OrderedDict(a=1)]
    pickled = pickle.dumps(value, protocol)
    assert pickles.Unpickler(pickled, tmp_path).load() == value
    with pytest.raises(pickle.UnpicklingError, match="expected the end"):
        pickles.vetted(pickled[:-1])


def test_a_pickle_of_another_protocol_is_not_read(tmp_path: Path) -> None:
    """It can be sound: a frozen set of protocol 4 is an opcode that torch's own pickles do not have."""
    torch.save({"weight": torch.ones(3), "names": frozenset((1, 2))}, tmp_path / "file.pt", pickle_protocol=4)
    with pytest.raises(NotReadError, match=r"file\.pt: expected an opcode of a checkpoint's pickle at its byte \d+"):
        torch_file.read(tmp_path / "file.pt")


def test_the_check_knows_every_opcode() -> None:
    """It skips over the operand of each opcode, or refuses the opcode."""
    refused = set()
    for opcode in pickletools.opcodes:
        code = opcode.code.encode("latin1")
        operand = {-1: b"1\n", -2: b"\1a", -3: b"\1\0\0\0a", -4: b"\1\0\0\0a", -5: b"\1" + bytes(7) + b"a"}
        width = opcode.arg.n if opcode.arg else 0
        behind = bytes(width) if width >= 0 else operand[width] * (2 if opcode.name in ("GLOBAL", "INST") else 1)
        try:
            pickles.vetted(code + behind + b".")
        except (pickle.UnpicklingError, pickles.NotReadError):
            refused.add(opcode.name)
        if width and opcode.name != "STOP":
            with pytest.raises((pickle.UnpicklingError, pickles.NotReadError)):
                pickles.vetted(code + behind)
    of_protocol_0 = {"INT", "LONG", "STRING", "UNICODE", "FLOAT", "GET", "PUT", "PERSID", "INST", "LIST", "DICT"}
    of_no_pickler = {
        "DUP",
        "OBJ",
        "FROZENSET",
        "LONG4",
        "EXT1",
        "EXT2",
        "EXT4",
        "NEXT_BUFFER",
        "READONLY_BUFFER",
    }
    assert refused == of_protocol_0 | of_no_pickler


@pytest.mark.parametrize("build", ["", "slots"])
@pytest.mark.parametrize(
    "name", ["torch\nSize", "collections\nOrderedDict", "builtins\nset", "torch\nTensor", "builtins\ngetattr"]
)
def test_a_pickle_changes_nothing_of_the_reader(name: str, build: str, path: Path) -> None:
    """BUILD sets attributes of what stands for a class or a function, if nothing prevents it."""
    state = b"(N}" + text("__iter__") + b"K\x01st" if build else b"}" + text("__iter__") + b"K\x01s"
    with_pickle(path, b"\x80\x02c" + name.encode() + b"\n" + state + b"b.")
    with pytest.raises(BadFileError):
        torch_file.read(path, trust=True)
    folder = path.parent / "index"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"\x80\x02c" + name.encode() + b"\n" + state + b"b.")
    with pytest.raises(BadFileError):
        torch_dist.read_index(folder)
    assert list(pickles.Size((1, 2))) == [1, 2]
    assert list(pickles.Ordered(a=1)) == ["a"]


def test_a_stub_has_no_attribute_of_the_name_of_a_method() -> None:
    made = pickles.stub("a", "b")()
    assert not {"items", "keys", "values", "get"} & {*dir(made)}


@pytest.mark.parametrize("shapes", [[argparse.Namespace()], argparse.Namespace(), [{"w": 3}], [["w"]]], ids=str)
def test_shapes_of_parameters_that_are_none(shapes: Any, path: Path) -> None:
    torch.save({"param_shapes": shapes}, path)
    with pytest.raises(BadFileError, match="expected the shapes of parameters"):
        zero_folder.of_model(torch_file.read(path))


def test_stubs_are_few() -> None:
    for part in range(2):
        names = b"".join(b"ca\nof_test_%d\n" % n for n in range(900 * part, 900 * part + 900))
        pickles.Unpickler(names + b".", Path("x")).load()
    assert pickles.stub.cache_info().currsize <= pickles.MOST_GLOBALS


def save_tensor(path: Path) -> Path:
    torch.save(BASE, path)
    return path


@pytest.mark.parametrize(
    ("start", "shape", "stride"),
    [(0, (25,), (1,)), (20, (5,), (1,)), (0, (2, 2), (23, 1)), (-1, (2,), (1,)), (0, (2,), (-1,)), (0, (2.0,), (1,))],
)
def test_a_tensor_past_its_storage_is_refused(start: Any, shape: Any, stride: Any, path: Path) -> None:
    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", 24) if isinstance(value, Storage) else None

    buffer = io.BytesIO()
    tensor = Call(torch._utils._rebuild_tensor_v2, Storage(), start, shape, stride, False, OrderedDict())
    Pickler(buffer, protocol=2).dump(tensor)
    with_pickle(path, buffer.getvalue())
    with pytest.raises(BadFileError, match="corrupt"):
        torch_file.read(path)


# Damaged files


def test_a_truncated_file_is_told_wherever_it_was_cut(path: Path) -> None:
    torch.save({"tensor": BASE, "more": BASE.clone()}, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BadFileError):
            torch_file.read(path)


def test_every_flipped_bit_is_refused_or_read_as_torch_does(path: Path) -> None:
    """Where torch.load fails or returns other values, nothing is read. All 12,000 bits with --every-release."""
    expected = {"w": torch.arange(4.0), "n": 3}
    header = saved(expected, path)["w"]
    whole, read = path.read_bytes(), 0
    outside = [at for at in range(len(whole)) if not header.offset <= at < header.offset + header.nbytes]
    flips = [(at, bit) for at in outside for bit in range(8)]
    for at, bit in flips if all_releases() else flips[:: len(flips) // 1500]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        with suppress(UserError):
            assert torch_file.read(path).value == {"w": header, "n": 3}, (at, bit)
            loaded = torch.load(path, weights_only=False)
            assert loaded.keys() == expected.keys()
            assert (loaded["n"], loaded["w"].tolist()) == (3, [0, 1, 2, 3]), (at, bit)
            read += 1
    assert read > 200


@pytest.mark.parametrize(
    ("name", "content"),
    [("other/version", b"3"), ("state/data/", b""), ("state/a/", b""), (b"state/\xff".decode("latin1"), b"")],
)
def test_a_record_that_torch_does_not_write(name: str, content: bytes, path: Path) -> None:
    with_pickle(path, pickle.dumps({}, 2))
    assert torch_file.read(path).value == {}
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name), content)
    raw = path.read_bytes().replace("state/\xff".encode(), b"state/\xff\xff")
    path.write_bytes(raw)
    with pytest.raises(BadFileError, match="corrupt"):
        torch_file.read(path)


@pytest.mark.parametrize("name", ["version", "byteorder", "data.pkl", ".data/serialization_id", ".format_version"])
def test_a_wrong_checksum_of_any_record(name: str, path: Path) -> None:
    torch.save({"n": 3}, path)
    with zipfile.ZipFile(path) as archive:
        checksum = struct.pack("<L", archive.getinfo(f"state/{name}").CRC)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(checksum, bytes(reversed(checksum))))
    with pytest.raises(BadFileError, match=f"the checksum of its record state/{name} is wrong"):
        torch_file.read(path)


def test_a_file_without_checksums_is_not_read(path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"n": 3}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.raises(NotReadError, match="has no checksums"):
        torch_file.read(path)


def test_a_record_of_a_sparse_file_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"n": 3}, path)
    monkeypatch.setattr(stored_zip, "LARGEST_READ", 10)
    with pytest.raises(BadFileError, match=r"its record state/data\.pkl has \d+ bytes"):
        torch_file.read(path)


def test_missing_empty_and_old_files(path: Path) -> None:
    with pytest.raises(BadFileError, match="No such file"):
        torch_file.read(path)
    path.touch()
    with pytest.raises(BadFileError, match="is empty"):
        torch_file.read(path)
    path.write_bytes(b"text")
    with pytest.raises(BadFileError, match=r"no file of torch\.save"):
        torch_file.read(path)
    torch.save(BASE, path, _use_new_zipfile_serialization=False)
    with pytest.raises(NotReadError, match=r"format before 1\.6"):
        torch_file.read(path)


@pytest.mark.parametrize(
    ("records", "error", "match"),
    [
        ({"state/data.pkl": b"\x80\x02}."}, BadFileError, "it has no record version"),
        (
            {"state/data.pkl": b"\x80\x02}.", "state/version": b"3", "state/byteorder": b"big"},
            NotReadError,
            "big-endian",
        ),
    ],
)
def test_records_of_another_torch(records: dict[str, bytes], error: type[UserError], match: str, path: Path) -> None:
    write(path, records)
    with pytest.raises(error, match=match):
        torch_file.read(path)


def test_a_compressed_record_is_refused(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("state/data.pkl", pickle.dumps({}))
    with pytest.raises(BadFileError, match="corrupt"):
        torch_file.read(path)


def test_a_storage_shorter_than_its_tensor_says(path: Path) -> None:
    torch.save(BASE, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    write(path, {name: data[:-4] if name.endswith("data/0") else data for name, data in records.items()})
    with pytest.raises(BadFileError, match="expected 96 bytes in its record data/0, found 92"):
        torch_file.read(path)
