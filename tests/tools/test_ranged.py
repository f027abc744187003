"""Ranges of many files are read correctly, with few files open, and an unreadable file is named."""

import os
from pathlib import Path

import pytest

from ckpt_patches.formats.ranged import RangedFiles


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    found = [tmp_path / str(number) for number in range(5)]
    for number, path in enumerate(found):
        path.write_bytes(bytes([number] * 8) + b"the end")
    return [str(path) for path in found]


def descriptors(paths: list[str]) -> list[str]:
    """The files among `paths` that this process has open."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sorted(target for link in links if os.path.islink(link) and (target := os.readlink(link)) in paths)


def test_ranges_come_as_they_are_and_nothing_stays_open(paths: list[str]) -> None:
    into = bytearray(10)
    with RangedFiles(2) as files:
        for _ in range(2):
            for number, path in enumerate(paths):
                files.read(path, 2, memoryview(into))
                assert into == bytes([number] * 6) + b"the "
                assert len(set(descriptors(paths))) <= 2
        assert set(descriptors(paths)) == set(paths[-2:])
    assert descriptors(paths) == []


def test_a_range_beyond_the_end_names_the_file(paths: list[str]) -> None:
    with RangedFiles() as files, pytest.raises(OSError, match=r"ends before its byte 20.*/3'"):
        files.read(paths[3], 10, memoryview(bytearray(10)))


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with RangedFiles() as files:
        with pytest.raises(FileNotFoundError, match="missing"):
            files.read(str(tmp_path / "missing"), 0, memoryview(bytearray(1)))
        with pytest.raises(IsADirectoryError, match=str(tmp_path)):
            files.read(str(tmp_path), 0, memoryview(bytearray(1)))
