"""Zip archives of torch are read as zipfile reads them, and zipfile and torch can read the archives written here."""

import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_patches.formats import stored_zip, torch_writer
from ckpt_patches.formats.stored_zip import Archive, BadArchiveError, Writer
from ckpt_patches.formats.torch_file import StorageHeader, TensorHeader

NAMES = st.binary(min_size=1, max_size=80).map(lambda name: re.sub(rb"[^a-z0-9./]|/$", b"_", name))
RECORDS = st.dictionaries(NAMES, st.lists(st.binary(max_size=300), max_size=3), max_size=80)


@contextmanager
def opened(path: Path) -> Iterator[Archive]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield Archive(descriptor, path.stat().st_size)
    finally:
        os.close(descriptor)


def written(records: dict[bytes, list[bytes]], path: Path) -> Path:
    with open(path, "wb") as file:
        archive = Writer(file)
        for name, pieces in records.items():
            archive.add(name, pieces)
        archive.finish()
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zip")


def same_as_zipfile(path: Path) -> None:
    with opened(path) as archive, zipfile.ZipFile(path) as expected:
        assert expected.testzip() is None
        assert {name: own[1:] for name, own in archive.records.items()} == {
            info.filename: (info.file_size, info.CRC) for info in expected.infolist()
        }
        for name in archive.records:
            assert archive.read(name) == expected.read(name)


@settings(max_examples=200, deadline=None)
@given(RECORDS)
def test_what_is_written_is_what_zipfile_reads(folder: Path, records: dict[bytes, list[bytes]]) -> None:
    path = written(records, folder / "state.pt")
    same_as_zipfile(path)
    with opened(path) as archive:
        assert {name.encode(): archive.read(name) for name in archive.records} == {
            name: b"".join(pieces) for name, pieces in records.items()
        }
        assert all(own.offset % stored_zip.ALIGNMENT == 0 for own in archive.records.values())


def test_what_torch_writes_is_read_as_zipfile_does(folder: Path) -> None:
    for count in (0, 3, 200):
        torch.save([torch.arange(number) for number in range(count)], folder / "torch.pt")
        same_as_zipfile(folder / "torch.pt")


class Sparse:
    """A file in which zeros are holes."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, data: Any) -> int:
        if len(data) == len(ZEROS):
            self.file.seek(len(ZEROS), os.SEEK_CUR)
            return len(ZEROS)
        return int(self.file.write(data))

    def tell(self) -> int:
        return int(self.file.tell())


ZEROS = bytes(64 << 20)


def test_a_tensor_of_more_than_4_gib_and_one_behind_it(tmp_path: Path) -> None:
    """The records and the directory store sizes and positions beyond 32 bits."""
    numel = 80 * len(ZEROS)
    keys = {"0": ("uint8", numel), "1": ("float32", 3)}
    value = [TensorHeader(StorageHeader(k, dtype, n, 0), dtype, 0, (n,), (1,)) for k, (dtype, n) in keys.items()]
    path, last = tmp_path / "state.pt", torch.tensor([1.0, 2.0, 3.0])
    with open(path, "wb") as file, torch_writer.torch_file(Sparse(file), "state", value) as records:
        records.add_storage("0", numel, [ZEROS] * 80)
        records.add_storage("1", 12, [last.numpy().tobytes()])
    assert path.stat().st_size > 5 << 30
    with opened(path) as archive, zipfile.ZipFile(path) as expected:
        for info in expected.infolist():
            assert archive.records[info.filename][1:] == (info.file_size, info.CRC)
        assert archive.read("state/data/1") == last.numpy().tobytes()
    first, second = torch.load(path, mmap=True, weights_only=True)
    assert (first.numel(), first[-1].item()) == (numel, 0)
    assert second.equal(last)


@pytest.mark.slow
def test_more_than_65535_records(tmp_path: Path) -> None:
    same_as_zipfile(written({f"data/{number}".encode(): [b"x"] for number in range(70_000)}, tmp_path / "many.zip"))


def test_two_records_of_one_name_are_refused(folder: Path) -> None:
    """Duplicate names are refused: readers would take different records."""
    with zipfile.ZipFile(folder / "twice.zip", "w") as archive:
        archive.writestr("a", b"1234")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a", b"5678")
    with pytest.raises(BadArchiveError, match="two records of the name a"), opened(folder / "twice.zip"):
        pass


@pytest.mark.parametrize("begin", [0, 1000])
def test_an_archive_within_a_file_and_its_new_checksum(folder: Path, begin: int) -> None:
    """A changed record gets a valid checksum, in archives of torch and zipfile, at the start or inside a file."""
    torch.save(torch.arange(5000), folder / "torch.pt")
    (folder / "zipfile.pt").write_bytes(b"")
    with zipfile.ZipFile(folder / "zipfile.pt", "w") as archive:
        archive.writestr("torch/data/0", bytes(5000))
    for inner in (folder / "torch.pt", folder / "zipfile.pt"):
        path, size = folder / "outer", inner.stat().st_size
        path.write_bytes(bytes(begin) + inner.read_bytes() + bytes(100))
        with open(path, "r+b") as file:
            stored = Archive(file.fileno(), size, begin).records["torch/data/0"]
            os.pwrite(file.fileno(), b"changed", stored.offset)
            with pytest.raises(BadArchiveError, match="checksum"):
                Archive(file.fileno(), size, begin).read("torch/data/0")
            with pytest.raises(BadArchiveError, match="expected 1000000 bytes"):
                stored_zip.update_checksum(file.fileno(), (begin, size), stored._replace(nbytes=10**6))
            stored_zip.update_checksum(file.fileno(), (begin, size), stored)
            assert Archive(file.fileno(), size, begin).read("torch/data/0")[:7] == b"changed"
        (folder / "inner.pt").write_bytes(path.read_bytes()[begin : begin + size])
        same_as_zipfile(folder / "inner.pt")


def test_an_entry_that_torch_reads_otherwise_is_refused(folder: Path) -> None:
    """The attribute of a folder: torch.load returns uninitialised memory. Others: torch.load fails."""
    whole = written({b"a": [b"1234"]}, folder / "whole.pt").read_bytes()
    entry = whole.index(b"PK\1\2")
    for offset, bit in [(6, 0x40), (8, 1), (8, 0x20), (10, 8), (34, 1), (38, stored_zip.FOLDER)]:
        changed = bytearray(whole)
        changed[entry + offset] ^= bit
        (folder / "changed.pt").write_bytes(changed)
        with pytest.raises(BadArchiveError), opened(folder / "changed.pt"):
            pass
