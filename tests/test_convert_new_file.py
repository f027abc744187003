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

from ckpt_patches.convert import new_file
from ckpt_patches.convert.convert import convert
from ckpt_patches.convert.new_file import PAGE, WORTH_IT, NewFile, file_system, pages, type_of
from deepspeed_patches.ds_to_universal import Options
from universal import files, parallel

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
    """The file is complete if the file system refuses O_DIRECT at open."""
    opened = os.open

    def refuse(path: Path, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    piece = os.urandom(3 * WORTH_IT)
    assert write(tmp_path / "file", [piece]) == piece


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

# Lines of mountinfo for these file systems, with and without optional fields, as in their manuals.
MOUNTS = """
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw,discard
30 27 259:1 / /local rw,noatime - xfs /dev/nvme0n1p1 rw,attr2,inode64
31 27 0:40 / /scratch rw,noatime - lustre 10.0.0.1@o2ib:10.0.0.2@o2ib:/scratch rw,flock,lazystatfs
33 27 0:42 /export/home /home rw,relatime shared:7 - nfs4 server:/export/home rw,vers=4.2,hard
34 27 0:43 / /data\\040set rw,nosuid - nfs server:/data rw,vers=3
35 27 0:44 / /bucket rw,nosuid,nodev - fuse.gcsfuse bucket rw,user_id=0
38 27 0:47 / / rw,relatime - overlay overlay rw,lowerdir=/a,upperdir=/b
40 27 253:3 /volumes/pvc-1 /checkpoints rw,relatime - ext4 /dev/mapper/pool rw
"""


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ((254, 0), "ext4"),
        ((259, 1), "xfs"),
        ((0, 40), "lustre"),
        ((0, 42), "nfs4"),
        ((0, 43), "nfs"),
        ((0, 44), "fuse.gcsfuse"),
        ((0, 47), "overlay"),
        ((253, 3), "ext4"),
        ((0, 99), ""),
    ],
)
def test_the_type_of_a_mounted_file_system(device: tuple[int, int], expected: str, monkeypatch: Any) -> None:
    assert type_of(os.makedev(*device), MOUNTS) == expected
    monkeypatch.setattr(new_file, "file_system", lambda _: expected)
    assert new_file.writes_directly(Path("/output")) == (expected in ("ext4", "xfs"))


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


def type_by_df(folder: Path) -> str:
    command = ["df", "--output=fstype", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]


def test_the_type_of_a_file_system_that_is_here(folder: Path) -> None:
    assert file_system(folder / "not" / "there yet") == type_by_df(folder)


def test_without_proc_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_file, "MOUNTS", tmp_path / "mountinfo")
    assert file_system(tmp_path) == ""


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
    monkeypatch.setattr(new_file, "LOCAL", (type_by_df(folder),) if directly else ())
    source = parallel("megatron")["megatron"]
    convert(source, folder / "universal", Options(workers=1), warn=pytest.fail)
    assert (log.read_text().splitlines()[0] == "True") == directly
    monkeypatch.undo()
    plain = tmp_path_factory.mktemp("plain") / "universal"
    convert(source, plain, Options(workers=1))
    assert files(folder / "universal") == files(plain)
