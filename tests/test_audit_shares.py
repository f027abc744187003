"""The shares of ranks in an audit or a repair: what each reads and copies, and how ranks compare files."""

import os
import shutil
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from ckpt_patches.audit.audit import audit, fingerprint
from ckpt_patches.audit.repair.copies import copy_checkpoint
from ckpt_patches.audit.shares import shares
from ckpt_patches.formats.paths import LinkOutsideError
from test_audit_many import arrays
from test_audit_many import written as by_hand
from test_audit_repair import contents


@pytest.mark.quick
@hypothesis.given(st.lists(st.integers(0, 1 << 40), max_size=50), st.integers(1, 20))
def test_shares_are_neighbours_and_all_there_is(costs: list[int], count: int) -> None:
    found = shares(costs, count)
    assert [item for own in found for item in own] == list(range(len(costs)))
    assert len(found) == count
    # No share exceeds the mean by more than half of the item at each of its ends.
    assert all(sum(costs[item] for item in own) <= sum(costs) / count + max(costs, default=0) for own in found)


def test_every_part_of_what_is_read_is_in_the_fingerprint(tmp_path: Path) -> None:
    first, second = (audit(by_hand(tmp_path / name, arrays(rows, 8))).checkpoint for name, rows in (("a", 9), ("b", 8)))
    assert fingerprint(first.shards) != fingerprint(second.shards)
    assert fingerprint(first.shards) == fingerprint(list(first.shards)) != fingerprint([])


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
