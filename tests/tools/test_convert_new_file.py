"""A file written with O_DIRECT has the same content as one written through the page cache."""

import errno
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_patches.convert import new_file, write
from ckpt_patches.convert.convert import convert
from ckpt_patches.convert.new_file import PAGE, WORTH_IT, NewFile, pages
from deepspeed_patches.ds_to_universal import Options
from universal import files, parallel

PIECES = st.lists(st.integers(0, 2 * WORTH_IT), max_size=6)


def written(path: Path, pieces: list[bytes], *, direct: bool = True, lent: bool = False) -> bytes:
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
        found = written(Path(folder, "file"), pieces, direct=direct, lent=lent)
    assert found == b"".join(pieces)


def test_a_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is complete if the file system refuses O_DIRECT at open."""
    opened = os.open

    def refuse(path: Path, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    piece = os.urandom(3 * WORTH_IT)
    assert written(tmp_path / "file", [piece]) == piece


def test_a_disk_with_other_pages(tmp_path: Path) -> None:
    """The file is complete if the disk refuses the alignment of the buffer, here an odd address."""
    buffer = pages(8 * PAGE)[1 : 1 + 4 * PAGE]
    file = NewFile(tmp_path / "file", buffer, direct=True)
    pieces = [os.urandom(3 * WORTH_IT), b"behind"]
    assert fill(file, tmp_path / "file", pieces) == b"".join(pieces)


def test_other_errors_are_raised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        NewFile(tmp_path / "none" / "file", pages(PAGE), direct=True)


# Where files are written with O_DIRECT


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on the tests' disk, and one in memory."""
    if request.param == "disk":
        yield tmp_path
    elif not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            yield Path(name)


def is_on_a_device(folder: Path) -> bool:
    """Whether `df` names a block device as the source of a folder's file system."""
    command = ["df", "--output=source", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1].startswith("/dev/")


def test_files_of_a_local_disk_are_written_directly(folder: Path) -> None:
    assert new_file.writes_directly(folder / "not" / "there yet") == is_on_a_device(folder)


@pytest.mark.parametrize("directly", [True, False])
def test_files_are_written_directly_or_through_the_page_cache(
    directly: bool, folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers open files with O_DIRECT on local disks, and the output is the same if the file system refuses it."""
    log, opened = tmp_path_factory.mktemp("log") / "log", os.open

    def logging(path: Any, flags: int, *mode: int, **keywords: Any) -> int:
        if ".unfinished-" in str(path) and str(path).endswith("fp32.pt"):
            with open(log, "a") as file:
                file.write(f"{bool(flags & os.O_DIRECT)}\n")
        return opened(path, flags, *mode, **keywords)

    monkeypatch.setattr(os, "open", logging)
    monkeypatch.setattr(write, "writes_directly", lambda _: directly)
    source = parallel("megatron")["megatron"]
    convert(source, folder / "universal", Options(workers=1), warn=pytest.fail)
    assert (log.read_text().splitlines()[0] == "True") == directly
    monkeypatch.undo()
    plain = tmp_path_factory.mktemp("plain") / "universal"
    convert(source, plain, Options(workers=1))
    assert files(folder / "universal") == files(plain)
