"""Syncing to disk: ignored failures, and errors; an unfinished folder."""

import errno
import os
import signal
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from ckpt_patches.errors import UserError
from ckpt_patches.runtime import durable, unfinished


def failing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_folder_that_the_disk_does_not_take_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that cannot sync folders is none."""
    for number in (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT):
        failing(monkeypatch, number)
        with pytest.raises(OSError, match=os.strerror(number)) as raised:
            durable.sync_folder(tmp_path)
        assert raised.value.filename == str(tmp_path)
    for number in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
        failing(monkeypatch, number)
        durable.sync_folder(tmp_path)


def test_an_error_of_a_file_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error") as raised:
        durable.write_durably(tmp_path / "x", b"")
    assert raised.value.filename == str(tmp_path / "x")


def test_a_file_system_without_advice_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def advise(*values: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    durable.replace_durably(tmp_path / "x", b"data")
    assert (tmp_path / "x").read_bytes() == b"data"


def test_every_new_folder_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    durable.make_folder(tmp_path / "a/b/c")
    assert (tmp_path / "a/b/c").is_dir()
    assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/b")]
    durable.make_folder(tmp_path / "a/b/c")
    assert len(synced) == 3


def conversion(
    beside: Path, depends_on: str = "", name: str = "output", source: Path | None = None
) -> unfinished.UnfinishedFolder:
    return unfinished.UnfinishedFolder(beside / name, "conversion", depends_on, source or beside / "source")


def test_the_converter_waits_for_many_folders_and_misses_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads sync the folders, and an error in any of them is raised."""
    work = conversion(tmp_path)
    folders = [work.working / str(index) for index in range(20)]
    for folder in folders:
        folder.mkdir(parents=True)

    def fsync(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), folders[15].stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="Input/output error") as raised:
            work.finish(())
        assert raised.value.filename == str(folders[15])
    assert work.working.is_dir()
    work.finish(())
    assert work.final.is_dir()


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ("n" * 250)
    for data in (b"first", b"second"):
        durable.replace_durably(path, data)
        assert path.read_bytes() == data
    failing(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        durable.replace_durably(path, b"third")
    assert path.read_bytes() == b"second"
    assert os.listdir(tmp_path) == [path.name]


def test_a_folder_with_the_name_of_an_incomplete_file_stays(tmp_path: Path) -> None:
    work = conversion(tmp_path)
    parameter = work.working / "zero" / f"{durable.TEMPORARY}abcd"
    parameter.mkdir(parents=True)
    (parameter / "fp32.pt").touch()
    (parameter / f"{durable.TEMPORARY}0-fp32.pt").touch()
    with work.held():
        assert os.listdir(parameter) == ["fp32.pt"]


def test_what_is_left_of_other_work_is_removed_unless_it_goes_on(tmp_path: Path) -> None:
    """So is nothing that a user has given such a name."""

    folder = partial(conversion, tmp_path)
    for own in (folder("a killed one"), folder("", "other")):
        with own.held():
            pass
    (tmp_path / f"output-{'0' * 12}.unfinished").mkdir()
    (tmp_path / "output-mine.unfinished").mkdir()
    child = os.fork()
    if child == 0:
        with folder("one that goes on").held():
            signal.pause()
    try:
        while not (folder("one that goes on").working / unfinished.LOCK).exists():
            time.sleep(0.01)
        time.sleep(0.2)  # until it has the lock
        with folder("this").held():
            found = {*os.listdir(tmp_path)}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    this, running, other = (
        own.working.name for own in (folder("this"), folder("one that goes on"), folder("", "other"))
    )
    assert found == {this, running, other, f"output-{'0' * 12}.unfinished", "output-mine.unfinished"}
    with folder("this").held():
        assert running not in os.listdir(tmp_path)


def test_what_this_process_writes_or_reads_is_not_removed(tmp_path: Path) -> None:
    folder = partial(conversion, tmp_path)
    with folder("killed").held():
        source = folder("killed").working / "step_1"
        source.mkdir()
        with folder("of another thread").held():
            assert source.is_dir()
        with pytest.raises(UserError, match="another conversion writes"), folder("killed").held():
            pass
    with folder("of its copy", source=source).held():
        assert source.is_dir()
    with unfinished.UnfinishedFolder(tmp_path / "output", "repair", "", tmp_path / "damaged", source).held():
        assert source.is_dir()


@pytest.mark.parametrize("late", [False, True])
def test_work_that_other_work_has_completed_is_refused_and_leaves_nothing(late: bool, tmp_path: Path) -> None:
    folder = partial(conversion, tmp_path)

    def complete(own: unfinished.UnfinishedFolder) -> None:
        (own.working / "file").write_text("content")
        own.finish(["file"], "latest")

    with folder("first").held(), folder("second").held() if late else nullcontext():
        complete(folder("first"))
        if late:
            with pytest.raises(UserError, match="output exists"):
                complete(folder("second"))
    with pytest.raises(UserError, match="output exists"), folder("second").held():
        pass
    with pytest.raises(UserError, match="output exists"):
        folder("second").check({})
    assert sorted(os.listdir(tmp_path)) == ["latest", "output"]
    assert os.listdir(tmp_path / "output") == ["file"]
