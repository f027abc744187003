"""apply and revert: atomic, exact to the byte, one at a time, and consistent with pip's RECORD."""

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_patches.engine import installed
from ckpt_patches.engine.registry import CORE
from ckpt_patches.errors import UserError
from ckpt_patches.inplace import rewrite
from installed_tree import (
    DIST_INFO,
    PRODUCT,
    ZARR,
    ZARR_FIX,
    ZARR_TEXT,
    apply,
    everything,
    make_installed,
    record_row,
    revert,
    snapshot,
)
from small_tree import IS_PATCHED, python


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_installed(tmp_path / "site-packages")


def test_apply_and_revert_leave_every_byte_and_mode_as_it_was(tree: Path) -> None:
    (tree / ZARR).chmod(0o640)
    before = snapshot(tree)
    assert apply(tree) == ["applies", "applies"]
    assert b"synchronizer=" in (tree / ZARR).read_bytes()
    assert (tree / ZARR).stat().st_mode & 0o777 == 0o640
    assert sorted(revert(tree)) == sorted([PRODUCT, ZARR_FIX])
    assert snapshot(tree) == before
    assert not (tree / installed.STATE_FOLDER).exists()


def test_both_are_idempotent(tree: Path) -> None:
    apply(tree)
    once = snapshot(tree)
    times = {path: path.stat().st_mtime_ns for path in tree.rglob("*.py")}
    apply(tree)
    assert snapshot(tree) == once
    assert times == {path: path.stat().st_mtime_ns for path in tree.rglob("*.py")}
    revert(tree)
    assert revert(tree) == []


@pytest.mark.parametrize("first", [PRODUCT, ZARR_FIX])
def test_fixes_come_and_go_one_by_one(tree: Path, first: str) -> None:
    before = snapshot(tree)
    second = ZARR_FIX if first == PRODUCT else PRODUCT
    apply(tree, first)
    only_first = snapshot(tree)
    apply(tree, second)
    assert set(rewrite.read_state(tree, CORE).fixes) == {first, second}
    assert revert(tree, second) == [second]
    assert snapshot(tree) == only_first
    assert revert(tree, first) == [first]
    assert snapshot(tree) == before


def test_the_edited_files_run_without_the_hook_and_revert_undoes_it(tree: Path) -> None:
    off = {"CKPT_PATCHES": "off"}
    assert python("-c", IS_PATCHED, tree=tree, env=off).stdout.strip() == "False"
    apply(tree, PRODUCT)
    assert python("-c", IS_PATCHED, tree=tree, env=off).stdout.strip() == "True"
    revert(tree)
    assert python("-c", IS_PATCHED, tree=tree, env=off).stdout.strip() == "False"


def test_bytecode_with_an_unchecked_hash_does_not_outlive_the_edit(tree: Path) -> None:
    compile_ = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", str(tree)]
    subprocess.run(compile_, check=True)
    apply(tree, PRODUCT)
    assert python("-c", IS_PATCHED, tree=tree, env={"CKPT_PATCHES": "off"}).stdout.strip() == "True"


@pytest.mark.parametrize(("mode", "stays"), [("unchecked-hash", False), ("checked-hash", True), ("timestamp", True)])
def test_bytecode_that_may_not_be_removed_matters_only_where_it_would_be_run(
    tree: Path, mode: str, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytecode that Python itself compares with the source may stay."""
    subprocess.run([sys.executable, "-m", "compileall", "-q", "--invalidation-mode", mode, str(tree)], check=True)
    monkeypatch.setattr(os, "access", lambda path, wanted: Path(path).name != "__pycache__")
    (cached,) = (tree / ZARR).parent.glob("__pycache__/zarr.*.pyc")
    apply(tree)
    assert cached.exists() == stays


def test_a_hard_link_elsewhere_keeps_its_text(tree: Path, tmp_path: Path) -> None:
    """Another environment's hard link, as package managers make it, keeps its text."""
    os.link(tree / ZARR, tmp_path / "cache.py")
    apply(tree, ZARR_FIX)
    assert (tmp_path / "cache.py").read_text() == ZARR_TEXT


def test_a_symbolic_link_is_one_again_and_what_it_leads_to_keeps_its_text(tree: Path, tmp_path: Path) -> None:
    """Revert restores a link, as some package managers make it; its target does not change."""
    (tree / ZARR).rename(tmp_path / "cache.py")
    (tree / ZARR).symlink_to("../../../../../cache.py")
    before = everything(tree)
    apply(tree)
    assert b"synchronizer=" in (tree / ZARR).read_bytes()
    assert (tmp_path / "cache.py").read_text() == ZARR_TEXT
    apply(tree, PRODUCT)
    revert(tree)
    assert everything(tree) == before


def test_a_symbolic_link_that_leads_elsewhere_by_now_is_not_made_again(tree: Path, tmp_path: Path) -> None:
    (tree / ZARR).rename(tmp_path / "cache.py")
    (tree / ZARR).symlink_to(tmp_path / "cache.py")
    apply(tree)
    (tmp_path / "cache.py").write_text("of a later release\n")
    revert(tree)
    assert (tree / ZARR).read_text() == ZARR_TEXT


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_what_root_applies_stays_the_property_of_its_owner(tree: Path) -> None:
    """Files keep their owner, who could not read a private file of root."""
    os.chown(tree / ZARR, 65534, 65534)
    (tree / ZARR).chmod(0o600)
    before = everything(tree)
    apply(tree)
    for path in (tree / ZARR, installed.state_folder(tree, CORE) / "originals" / ZARR):
        assert (path.stat().st_uid, path.stat().st_gid, path.stat().st_mode & 0o777) == (65534, 65534, 0o600)
    revert(tree)
    assert everything(tree) == before


@pytest.mark.parametrize("leads_to", ["other", "nothing"])
def test_what_is_left_beside_a_file_is_not_written_through(leads_to: str, tree: Path, tmp_path: Path) -> None:
    """Links with our temporary names, left by a killed run or planted, are not followed."""
    (tmp_path / "other").write_text("of somebody else")
    names = [".zarr.py.ckpt-patches", ".zarr.py.ckpt-patches-before"]
    for name in names:
        (tree / ZARR).with_name(name).symlink_to(tmp_path / leads_to)
    before = everything(tree)
    apply(tree)
    revert(tree)
    assert not (tmp_path / "nothing").exists()
    assert (tmp_path / "other").read_text() == "of somebody else"
    assert everything(tree) == before


def test_record_stays_true(tree: Path) -> None:
    def wrong() -> list[str]:
        with open(tree / DIST_INFO / "RECORD", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
        missing = [row[0] for row in rows if not (tree / row[0]).exists()]
        hashed = [row for row in rows if row[1] and (tree / row[0]).exists()]
        return missing + [row[0] for row in hashed if ",".join(row) != record_row(tree, tree / row[0])]

    assert wrong() == []
    apply(tree)
    assert wrong() == []
    listed = (tree / DIST_INFO / "RECORD").read_text()
    ours = [path for path in snapshot(tree) if path.startswith(installed.STATE_FOLDER)]
    assert ours
    assert all(path in listed for path in ours)  # an uninstall of megatron-core removes them


# Refusals


def test_a_file_that_changed_since_is_refused_and_nothing_changes(tree: Path) -> None:
    apply(tree)
    (tree / ZARR).write_text((tree / ZARR).read_text() + "# by hand\n")
    edited = snapshot(tree)
    for change in (revert, apply):
        with pytest.raises(UserError, match=r"zarr\.py changed since the fixes were applied"):
            change(tree)
        assert snapshot(tree) == edited


def damage(path: Path) -> None:
    path.write_text("garbage = 1\n")


@pytest.mark.parametrize("break_", [damage, Path.unlink])
@pytest.mark.parametrize("change", [apply, revert])
def test_an_original_that_is_not_what_it_was_is_refused_and_nothing_changes(
    tree: Path, change: Callable[[Path], object], break_: Callable[[Path], object]
) -> None:
    """apply and revert both start from the originals and refuse a changed or missing one."""
    apply(tree)
    backup = installed.state_folder(tree, CORE) / "originals" / ZARR
    break_(backup)
    broken = snapshot(tree)
    with pytest.raises(UserError) as refused:
        change(tree)
    message = str(refused.value)
    assert "\n" not in message
    assert re.search(rf"expected the original of .*zarr\.py \(SHA-256 [0-9a-f]{{64}}\) in {backup}, found ", message)
    assert ("found no such file" in message) == (break_ is Path.unlink)
    assert message.endswith(
        f"nothing of {CORE} was changed. Reinstall megatron-core, or restore it in a checkout, and "
        f"delete {backup.parents[len(Path(ZARR).parts)]}"
    )
    assert snapshot(tree) == broken


def test_unreadable_text_is_refused_and_nothing_changes(tree: Path) -> None:
    (tree / ZARR).write_bytes(b"x = '\xe9'\n")
    before = snapshot(tree)
    with pytest.raises(UserError, match=r"zarr\.py: expected UTF-8.*nothing of megatron.core was changed"):
        apply(tree)
    assert snapshot(tree) == before


def test_a_damaged_state_is_refused(tree: Path) -> None:
    apply(tree)
    state = installed.state_folder(tree, CORE) / "state.json"
    state.write_text('{"version": 99}')
    with pytest.raises(UserError, match="expected version 1 of our state"):
        revert(tree)


def edit_state(tree: Path, edit: Callable[[Any], object]) -> None:
    path = installed.state_folder(tree, CORE) / "state.json"
    state = json.loads(path.read_text())
    edit(state)
    path.write_text(json.dumps(state))


@pytest.mark.parametrize("path", ["../other", "/etc/hostname", ""])
def test_a_state_that_names_a_file_outside_of_the_tree_is_refused(tree: Path, path: str) -> None:
    """Such a state is refused, since a tree with our folder may come from somebody else."""
    apply(tree)
    edit_state(tree, lambda state: state["files"][0].update(path=path))
    before = everything(tree)
    for change in (revert, apply):
        with pytest.raises(UserError, match=r"state in .*state\.json, found .*a path in the tree"):
            change(tree)
    assert everything(tree) == before


def test_a_fix_that_only_another_version_knows_is_not_taken_out_in_silence(tree: Path) -> None:
    apply(tree)
    edit_state(tree, lambda state: state["fixes"].append("of_tomorrow"))
    before = everything(tree)
    for change in (apply, revert):
        with pytest.raises(UserError, match="of_tomorrow, which this version does not know"):
            change(tree, PRODUCT)
    assert everything(tree) == before


def test_an_applied_fix_that_fits_no_more_is_not_taken_out_in_silence(tree: Path) -> None:
    """A fix that no longer matches the originals, as after our upgrade, is an error."""
    before = snapshot(tree)
    apply(tree)
    edit_state(tree, lambda state: state["fixes"].append("zarr_range_write"))
    applied = snapshot(tree)
    for change in (apply, revert):
        with pytest.raises(
            UserError, match=r"zarr_range_write is applied in place, and would be lost: .* Revert it first"
        ):
            change(tree, PRODUCT)
        assert snapshot(tree) == applied
    assert revert(tree, "zarr_range_write") == ["zarr_range_write"]
    revert(tree)
    assert snapshot(tree) == before


def without_rights() -> list[str]:
    """The command prefix that drops root's right to write anywhere."""
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--reuid=65534", "--regid=65534", "--clear-groups"]


@pytest.mark.skipif(os.geteuid() != 0, reason="drops root's rights")
def test_a_read_only_tree_is_one_clear_line(tree: Path, tmp_path: Path) -> None:
    for folder in [tmp_path, *tmp_path.parents[:3]]:
        folder.chmod(folder.stat().st_mode | 0o055)
    if subprocess.run([*without_rights(), sys.executable, "-c", ""], capture_output=True).returncode != 0:
        pytest.skip("nobody but root may run this Python")
    command = [*without_rights(), sys.executable, "-m", "ckpt_patches", "apply", "--tree", str(tree), PRODUCT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "no permission to write there; nothing of megatron.core was changed" in line


# Concurrency


def test_two_at_once_take_turns(tree: Path) -> None:
    command = [sys.executable, "-m", "ckpt_patches"]
    both = [[*command, "apply", "--tree", str(tree), name] for name in (PRODUCT, ZARR_FIX)] * 3
    processes = [subprocess.Popen(arguments, stderr=subprocess.PIPE) for arguments in both]
    assert [process.wait() for process in processes] == [0] * 6
    assert set(rewrite.read_state(tree, CORE).fixes) == {PRODUCT, ZARR_FIX}
    revert(tree)
    assert (tree / ZARR).read_text() == ZARR_TEXT
