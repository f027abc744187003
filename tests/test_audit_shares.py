"""The shares of ranks in an audit or a repair: what each reads and copies, and how ranks compare files."""

import os
import shutil
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from ckpt_patches.audit.audit import audit, fingerprint
from ckpt_patches.audit.repair.copies import begin_copy, copy_ranges, end_copy
from ckpt_patches.audit.shares import shares
from ckpt_patches.errors import UserError
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


def test_a_copy_is_the_same_however_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_patches.audit.repair.copies.AT_A_TIME", 7)
    monkeypatch.setattr("ckpt_patches.audit.repair.copies.BUFFER", 3)
    source = tmp_path / "source"
    (source / "a" / "b").mkdir(parents=True)
    for size in range(30):
        (source / "a" / f"{size}").write_bytes(bytes(range(size)))
    (source / "a" / "x.sync").mkdir()
    (source / "link").symlink_to(source / "a" / "29")
    os.chmod(source / "a" / "29", 0o640)
    os.chmod(source / "a", 0o750)
    ranges = begin_copy(source, tmp_path / "copy", but="*.sync")
    assert max(found.end - found.begin for found in ranges) == 7
    for own in (ranges[::2], ranges[1::2]):
        copy_ranges(own, source, tmp_path / "copy")
    end_copy(source, tmp_path / "copy")
    shutil.copytree(source, tmp_path / "by_the_library", ignore=shutil.ignore_patterns("*.sync"))
    assert contents(tmp_path / "copy") == contents(tmp_path / "by_the_library")
    assert sorted(map(str, (p.relative_to(tmp_path / "copy") for p in (tmp_path / "copy").rglob("*")))) == sorted(
        map(str, (p.relative_to(tmp_path / "by_the_library") for p in (tmp_path / "by_the_library").rglob("*")))
    )
    assert not (tmp_path / "copy" / "link").is_symlink()
    for file in (tmp_path / "copy").rglob("*"):
        assert file.stat().st_mode == (tmp_path / "by_the_library" / file.relative_to(tmp_path / "copy")).stat().st_mode


def test_what_is_no_file_is_not_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    os.mkfifo(source / "pipe")
    with pytest.raises(UserError, match="expected a file or a folder, which can be copied, found neither"):
        begin_copy(source, tmp_path / "copy", but="*.sync")
