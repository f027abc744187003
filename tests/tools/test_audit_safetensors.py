"""Files of safetensors: headers, indexes and elements."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, UNKNOWN, WHOLE, audit
from ckpt_patches.cli import main
from ckpt_patches.formats.files_reader import WEIGHTS_ALONE
from crafted_files import Change, found_in, names
from dcp_checkpoints import saved_by_ranks

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}
Tensors = dict[str, torch.Tensor]
AB = {"a": torch.ones(3), "b": torch.ones(2, 2)}


def written(path: Path, tensors: Tensors, change: Callable[[Any], object] = lambda header: None) -> None:
    """Write a file by the format's specification."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        own = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(own)]
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += own
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = tmp_path / "sharded"
    path.mkdir()
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 8))
    tensors = list(model.state_dict().items())
    parts = [dict(tensors[:2]), dict(tensors[2:])]
    for file, part in zip(SHARDS, parts, strict=True):
        written(path / file, part)
    listed = {name: file for file, part in zip(SHARDS, parts, strict=True) for name in part}
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": listed}))
    return path


def test_a_sound_one_is_whole(sharded: Path) -> None:
    report = audit(sharded)
    assert (report.verdict, names(report), report.checkpoint.format) == (WHOLE, set(), WEIGHTS_ALONE)


HEADERS: dict[str, Callable[[Any], object]] = {
    "a gap": lambda header: header.pop("a"),
    "the end is missing": lambda header: header.pop("b"),
    "no type": lambda header: header["b"].pop("dtype"),
    "no shape": lambda header: header["b"].pop("shape"),
    "no offsets": lambda header: header["b"].pop("data_offsets"),
    "a type of another size": lambda header: header["b"].update(dtype="F64"),
    "a type that is no text": lambda header: header["b"].update(dtype=4),
    "another shape": lambda header: header["b"].update(shape=[5]),
    "negative": lambda header: header["b"].update(shape=[-2, -2]),
    "fractions": lambda header: header["b"].update(shape=[2.0, 2.0]),
    "too many elements": lambda header: header["b"].update(shape=[1 << 62, 4]),
    "overlapping": lambda header: header["b"].update(data_offsets=[8, 24]),
    "beyond the end": lambda header: header["b"].update(data_offsets=[32, 48]),
    "backwards": lambda header: header["b"].update(data_offsets=[28, 12]),
    "at the same place": lambda header: header["b"].update(data_offsets=[0, 16]),
    "twice": lambda header: header.update(c=header["b"]),
    "no dict": lambda header: header.update(b=[1, 2]),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_wrong_header_is_found(tmp_path: Path, what: str) -> None:
    written(tmp_path / ONE, AB, HEADERS[what])
    assert found_in(tmp_path) == (DAMAGED, {"bad_file"})


def test_a_file_that_is_cut_anywhere_is_found(tmp_path: Path) -> None:
    written(tmp_path / ONE, AB)
    data = (tmp_path / ONE).read_bytes()
    for changed in (*(data[:size] for size in range(len(data))), data + b"\0"):
        (tmp_path / ONE).write_bytes(changed)
        assert found_in(tmp_path) == (DAMAGED, {"bad_file"}), len(changed)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 8 + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{]",
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        (13).to_bytes(8, "little") + b'{"a":1,"a":1}',
    ],
)
def test_what_is_no_header_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ONE).write_bytes(data)
    assert found_in(tmp_path) == (DAMAGED, {"bad_file"})


# The index


def changed(make: Callable[[Any], object]) -> Change:
    def apply(path: Path) -> None:
        index = json.loads((path / INDEX).read_text())
        make(index)
        (path / INDEX).write_text(json.dumps(index))

    return apply


def without_index(path: Path) -> None:
    (path / INDEX).unlink()


def cut(file: str) -> Change:
    return lambda path: (path / file).write_bytes((path / file).read_bytes()[:-4])


SHARDED: dict[str, tuple[Change, str, set[str]]] = {
    **{f"{file} cut": (cut(file), DAMAGED, {"bad_file"}) for file in SHARDS},
    "a shard missing": (lambda path: (path / SHARDS[1]).unlink(), DAMAGED, {"bad_file"}),
    "a weight of no file": (
        changed(lambda index: index["weight_map"].update(other=SHARDS[0])),
        DAMAGED,
        {"missing_weight"},
    ),
    "another file": (
        changed(lambda index: index["weight_map"].update({"0.weight": SHARDS[1]})),
        DAMAGED,
        {"contradiction"},
    ),
    "a weight left out": (changed(lambda index: index["weight_map"].pop("0.weight")), UNKNOWN, {"unusual"}),
    "no map": (changed(lambda index: index.pop("weight_map")), DAMAGED, {"bad_metadata", "unusual"}),
    "a file outside": (
        changed(lambda index: index.update(weight_map={"a": "../a.safetensors"})),
        DAMAGED,
        {"bad_metadata", "unusual"},
    ),
    "no file": (changed(lambda index: index.update(weight_map={"w": None})), DAMAGED, {"bad_metadata", "unusual"}),
    "a file that is not listed": (lambda path: shutil.copy(path / SHARDS[0], path / ONE), UNKNOWN, {"unusual"}),
    "no index": (without_index, UNKNOWN, {"unusual"}),
}


@pytest.mark.parametrize("what", SHARDED)
def test_the_index_and_the_files_agree(sharded: Path, what: str) -> None:
    make, verdict, expected = SHARDED[what]
    make(sharded)
    assert found_in(sharded) == (verdict, expected)


# Elements


ZEROS = torch.zeros(8, 8)
LORA = {f"layers.{n}.lora_{letter}.weight": torch.ones(4, 16) for n in range(2) for letter in "AB"}
ELEMENTS: dict[str, tuple[Tensors, str, set[str]]] = {
    "NaN": ({"a": torch.ones(300), "b": torch.tensor([1, torch.nan, torch.inf])}, DAMAGED, {"not_finite"}),
    "other types": ({"a": torch.ones(3).bfloat16(), "empty": torch.ones(0, 4), "one": torch.tensor(1.0)}, WHOLE, set()),
    # Observers have no elements before they see data; a new adapter's last matrix is zeros, as a norm can be.
    "an observer": ({"a.min_val": torch.zeros(0), "a.weight": torch.ones(4, 4)}, WHOLE, set()),
    "a new adapter": ({**LORA, "z.lora_B.weight": ZEROS}, WHOLE, set()),
    "a norm of zeros": ({"layers.0.weight": torch.ones(8, 8), "norm.weight": torch.zeros(8)}, WHOLE, set()),
    "a head of zeros": (
        {"a.weight": torch.ones(8, 8), "head.bias": torch.zeros(8), "head.weight": ZEROS},
        UNKNOWN,
        {"unusual"},
    ),
}


@pytest.mark.parametrize("what", ELEMENTS)
def test_elements(tmp_path: Path, what: str) -> None:
    tensors, verdict, expected = ELEMENTS[what]
    written(tmp_path / ONE, tensors)
    assert found_in(tmp_path) == (verdict, expected)


def test_a_type_that_came_later_is_not_read(tmp_path: Path) -> None:
    written(tmp_path / ONE, {"a": torch.ones(4)}, lambda header: header["a"].update(dtype="F4", shape=[32]))
    assert found_in(tmp_path) == (UNKNOWN, {"not_read"})


def test_a_trainers_checkpoint_below_is_audited_too(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights and a checkpoint in a folder beside them, as Transformers saves with DeepSpeed, are both audited."""
    inner = shutil.copytree(saved_by_ranks(2) / "fsdp2", sharded / "inner")
    assert main(["audit", str(sharded)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if f": {WHOLE} (" in line] == [str(sharded), str(inner)]
    assert f"resume from: {inner}" in lines[-1]


def test_links_within_hugging_faces_cache_are_followed(tmp_path: Path) -> None:
    model = tmp_path / "models--org--name"
    snapshot = model / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    written(model / "blobs" / "4567", {"weight": torch.ones(4)})
    (snapshot / ONE).symlink_to("../../blobs/4567")
    assert audit(snapshot).verdict == WHOLE
    (model / "blobs" / "4567").rename(tmp_path / "elsewhere")
    (snapshot / ONE).unlink()
    (snapshot / ONE).symlink_to(tmp_path / "elsewhere")
    assert audit(snapshot).verdict == UNKNOWN
