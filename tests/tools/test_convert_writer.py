"""Files that the one-pass converter writes without torch load like files of torch.save."""

import argparse
import io
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_patches.formats import torch_file, torch_writer
from ckpt_patches.formats.torch_file import storages_in
from ckpt_patches.runtime.progress import Progress, line
from upstream import TESTS

BASE = torch.arange(24, dtype=torch.float32)


def with_attributes() -> torch.Tensor:
    tensor = BASE.clone()
    tensor.ds_id = "0_6"
    return tensor


shared = [1, 2]
VALUES: dict[str, Any] = {
    "plain": {"none": None, "numbers": [1, 2.5, 2**70, True, -1], "bytes": b"\x00\xff", "none of them": b"", 3: ("a",)},
    "containers": OrderedDict(a={1, 2}, b=frozenset({3}), c=(), d=[shared, shared], e=torch.Size([2, 3])),
    "objects": {"args": argparse.Namespace(tp=2, dtype=torch.bfloat16), "dtype": torch.float16},
    "views": [BASE[:4], BASE[8:].view(4, 4).t(), torch.tensor(7.0)],
    "kinds": [BASE.bfloat16(), BASE.to(torch.float8_e4m3fn), BASE.bool(), torch.empty(0, 3), BASE.long()],
    "parameter": torch.nn.Parameter(BASE.clone()),
    "attributes": with_attributes(),
    "gradient": BASE.clone().requires_grad_(),
}


def rewritten(value: Any, folder: Path) -> Path:
    """Save with torch, read the headers, and write them again."""
    torch.save(value, folder / "torch.pt")
    header = torch_file.read(folder / "torch.pt").value
    original = (folder / "torch.pt").read_bytes()
    with open(folder / "ours.pt", "wb") as file, torch_writer.torch_file(file, "ours", header) as records:
        for storage in storages_in(header):
            data = original[storage.offset : storage.offset + storage.nbytes]
            records.add_storage(storage.key, storage.nbytes, [data[:5], data[5:]])
    return folder / "ours.pt"


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS / "programs"))


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, by the comparison of checkpoints."""
    from same_universal import differences

    return differences(one, other) == []


@pytest.mark.parametrize("name", VALUES)
def test_torch_loads_what_it_had_saved(name: str, tmp_path: Path) -> None:
    """torch loads the value, read or mapped."""
    path = rewritten(VALUES[name], tmp_path)
    for options in ({}, {"mmap": True}):
        assert same(torch.load(path, weights_only=False, **options), VALUES[name])
    if name not in ("containers", "objects", "plain"):  # torch refuses frozenset, Namespace, bytes()
        assert same(torch.load(path, weights_only=True), VALUES[name])


def test_quantized_tensors_come_back_with_their_scales(tmp_path: Path) -> None:
    scales, zeros = torch.tensor([0.5, 0.25], dtype=torch.float64), torch.tensor([0, 1])
    value = [
        torch.quantize_per_tensor(BASE, 0.5, 1, torch.qint8),
        torch.quantize_per_channel(BASE.view(2, 12), scales, zeros, 0, torch.quint8),
    ]
    one, other = torch.load(rewritten(value, tmp_path), weights_only=False)
    assert (one.int_repr().equal(value[0].int_repr()), one.q_scale(), one.q_zero_point()) == (True, 0.5, 1)
    assert other.int_repr().equal(value[1].int_repr())
    assert other.q_per_channel_scales().equal(scales)


def test_views_and_lists_are_shared_as_they_were(tmp_path: Path) -> None:
    one, other = torch.load(rewritten([BASE[:4], BASE[8:]], tmp_path))
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    value = torch.load(rewritten(VALUES["containers"], tmp_path), weights_only=False)
    assert value["d"][0] is value["d"][1]


def test_the_zip_is_sound_and_aligned(tmp_path: Path) -> None:
    path = rewritten(VALUES["views"], tmp_path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None  # every checksum
    found = torch_file.read(path).value
    assert all(tensor.storage.offset % 64 == 0 for tensor in found)


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_line_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "INTERVAL", 0)
    terminal, other = Terminal(), io.StringIO()
    for file in (terminal, other):
        with Progress(4 << 30, file, label="iter_0000010:") as progress:
            progress.show(1 << 30)
    assert "iter_0000010:  25% 1.0 GiB of 4.0 GiB" in terminal.getvalue()
    assert other.getvalue() == ""
    assert line(1 << 30, 4 << 30, 2.0) == "  25% 1.0 GiB of 4.0 GiB, 512.0 MiB/s, 6 s left"
    assert line(0, 0, 0.0) == " 100% 0 B of 0 B, 0 B/s, ? s left"
