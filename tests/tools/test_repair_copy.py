"""The copy of a checkpoint that a repair changes."""

import os
import shutil
from pathlib import Path

import pytest

from ckpt_patches.audit.repair.copies import copy_checkpoint
from ckpt_patches.formats.paths import LinkOutsideError
from test_audit_repair import contents


def test_a_copy_is_what_the_library_copies(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    (source / "a" / "b").mkdir(parents=True)
    for size in range(30):
        (source / "a" / f"{size}").write_bytes(bytes(range(size)))
    (source / "a" / "x.sync").mkdir()
    (source / "link").symlink_to(source / "a" / "29")
    os.chmod(source / "a" / "29", 0o640)
    os.chmod(source / "a" / "28", 0o444)
    os.chmod(source / "a", 0o750)
    copy_checkpoint(source, copy, copy, lambda line: None)
    by_the_library = tmp_path / "by_the_library"
    shutil.copytree(source, by_the_library, ignore=shutil.ignore_patterns("*.sync"))
    assert contents(copy) == contents(by_the_library)
    assert not (copy / "link").is_symlink()
    os.chmod(by_the_library / "a" / "28", 0o644)  # the owner can write to a copy
    for folder in (copy, by_the_library):
        assert sorted((str(p.relative_to(folder)), p.stat().st_mode) for p in folder.rglob("*")) == sorted(
            (str(p.relative_to(copy)), p.stat().st_mode) for p in copy.rglob("*")
        )


def test_what_is_no_file_is_not_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    os.mkfifo(source / "pipe")
    with pytest.raises(OSError, match="expected a regular file, found a pipe or a device"):
        copy_checkpoint(source, tmp_path / "copy", tmp_path / "copy", lambda line: None)


@pytest.mark.parametrize("name", ["file", "folder"])
def test_no_link_is_followed_out(name: str, tmp_path: Path) -> None:
    source, outside = tmp_path / "source", tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_text("secret")
    source.mkdir()
    (source / "link").symlink_to(outside / name)
    with pytest.raises(LinkOutsideError, match="outside of the checkpoint"):
        copy_checkpoint(source, tmp_path / "copy", tmp_path / "copy", lambda line: None)
    assert not (tmp_path / "copy").exists()
