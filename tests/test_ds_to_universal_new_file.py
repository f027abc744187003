"""A file that is written past the page cache holds what one that is written through it does."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_patches.ds_to_universal.new_file import PAGE, WORTH_IT, NewFile, pages

PIECES = st.lists(st.integers(0, 2 * WORTH_IT), max_size=6)


def write(path: Path, pieces: list[bytes], *, direct: bool = True, lent: bool = False) -> bytes:
    """Write pieces with a small buffer, and read the file back."""
    return fill(NewFile(path, pages(4 * PAGE), direct=direct), path, pieces, lent=lent)


def fill(file: NewFile, path: Path, pieces: list[bytes], *, lent: bool = False) -> bytes:
    for piece in pieces:
        rest = memoryview(piece)
        while lent and rest:
            room = file.room(len(rest))
            room[:] = rest[: len(room)]
            rest = rest[file.write(room) :]
        assert lent or file.write(piece) == len(piece)
    assert file.tell() == sum(map(len, pieces))
    file.finish()
    file.sync()
    file.close()
    return path.read_bytes()


@given(sizes=PIECES, direct=st.booleans(), lent=st.booleans())
def test_holds_what_was_written(sizes: list[int], direct: bool, lent: bool) -> None:
    pieces = [os.urandom(size) for size in sizes]
    with tempfile.TemporaryDirectory() as folder:
        found = write(Path(folder, "file"), pieces, direct=direct, lent=lent)
    assert found == b"".join(pieces)


def test_a_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses to open the file."""
    opened = os.open

    def refuse(path: Path, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    piece = os.urandom(3 * WORTH_IT)
    assert write(tmp_path / "file", [piece]) == piece


def test_a_disk_with_other_pages(tmp_path: Path) -> None:
    """It refuses to write from where the memory lies; here because that is at an odd address."""
    buffer = pages(8 * PAGE)[1 : 1 + 4 * PAGE]
    file = NewFile(tmp_path / "file", buffer, direct=True)
    pieces = [os.urandom(3 * WORTH_IT), b"behind"]
    assert fill(file, tmp_path / "file", pieces) == b"".join(pieces)


def test_other_errors_are_raised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        NewFile(tmp_path / "none" / "file", pages(PAGE), direct=True)
