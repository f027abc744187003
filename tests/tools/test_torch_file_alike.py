"""Chunks with the pickle of an earlier one are not unpickled again, with the result of the ordinary reader."""

import io
import os
from pathlib import Path

import pytest
import torch

from ckpt_patches.errors import UserError
from ckpt_patches.formats import torch_file
from ckpt_patches.formats.torch_file import TorchFile, read_within


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def write(path: Path, parts: list[bytes]) -> list[tuple[int, int]]:
    path.write_bytes(b"".join(parts))
    return [(sum(map(len, parts[:number])), len(part)) for number, part in enumerate(parts)]


def read(path: Path, span: tuple[int, int]) -> TorchFile | str:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_within(descriptor, path, span)
    except UserError as error:
        return str(error)
    finally:
        os.close(descriptor)


def slowly(path: Path, span: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> TorchFile | str:
    with monkeypatch.context() as patch:
        patch.setattr(torch_file, "_TENSORS", {})
        return read(path, span)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_file, "_TENSORS", {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (1, 1, 40), (64, 64), (40, 100, 3), (0,), ()])
def test_alike_ones_are_read_as_each_by_itself(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [saved(torch.randn(shape).to(dtype)) for _ in range(4)] + [saved([1]), saved(torch.ones(5, 5).T)]
    path = tmp_path / "file"
    for span in write(path, parts):
        assert read(path, span) == slowly(path, span, monkeypatch)


def test_the_short_way_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first chunk is unpickled."""
    spans = write(tmp_path / "file", [saved(torch.full((9, 9), float(number))) for number in range(3)])
    assert isinstance(read(tmp_path / "file", spans[0]), TorchFile)
    monkeypatch.setattr(torch_file, "_Unpickler", None)
    assert all(isinstance(read(tmp_path / "file", span), TorchFile) for span in spans)


def test_whatever_byte_is_another_one_it_is_read_as_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [saved(torch.arange(6.0)), saved(torch.arange(6.0, 12.0))]
    for number in range(len(parts[1])):
        changed = bytearray(parts[1])
        changed[number] ^= 1 + number % 255
        path = tmp_path / "file"
        first, second = write(path, [parts[0], bytes(changed)])
        assert isinstance(read(path, first), TorchFile)
        assert read(path, second) == slowly(path, second, monkeypatch), number
