"""apply and revert: everything or nothing, byte for byte, one at a time, and honest to pip."""

import base64
import csv
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_patches import inplace, transaction
from ckpt_patches.errors import UserError
from ckpt_patches.registry import CORE
from small_tree import IS_PATCHED, make, python

PRODUCT, ZARR_FIX = "numpy2_product", "zarr_create_synchronizer"
ZARR = "megatron/core/dist_checkpointing/strategies/zarr.py"
ZARR_TEXT = """import zarr


def _create_zarr_array(sharded_tensor, checkpoint_dir):
    return zarr.create(1, store=checkpoint_dir)


def load_zarr_based_sharded_metadata(checkpoint_dir):
    return [subdir for subdir in checkpoint_dir if not (subdir / ".zarray").exists()]
"""
DIST_INFO = "megatron_core-0.14.0.dist-info"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two modules that two fixes edit, installed: with a RECORD."""
    root = tmp_path / "site-packages"
    make(root)
    (root / ZARR).parent.mkdir()
    (root / ZARR).write_text(ZARR_TEXT)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    rows = [record_row(root, path) for path in files]
    (root / DIST_INFO).mkdir()
    record = "".join(f"{row}\r\n" for row in [*rows, f"{DIST_INFO}/RECORD,,"])
    (root / DIST_INFO / "RECORD").write_bytes(record.encode())
    return root


def record_row(root: Path, path: Path) -> str:
    data = path.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path.relative_to(root).as_posix()},sha256={digest},{len(data)}"


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its bytes and mode."""
    files = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mode) for path in files}


def apply(root: Path, *names: str) -> list[str]:
    plan = inplace.apply(str(root), CORE, names or (PRODUCT, ZARR_FIX))
    return [result.outcome.value for result in plan.results]


def revert(root: Path, *names: str) -> list[str]:
    return inplace.revert(str(root), CORE, names or (PRODUCT, ZARR_FIX))


def test_apply_and_revert_leave_every_byte_and_mode_as_it_was(tree: Path) -> None:
    (tree / ZARR).chmod(0o640)
    before = snapshot(tree)
    assert apply(tree) == ["applies", "applies"]
    assert b"synchronizer=" in (tree / ZARR).read_bytes()
    assert (tree / ZARR).stat().st_mode & 0o777 == 0o640
    assert sorted(revert(tree)) == sorted([PRODUCT, ZARR_FIX])
    assert snapshot(tree) == before
    assert not (tree / inplace.STATE_FOLDER).exists()


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
    assert set(inplace.read_state(tree, CORE).fixes) == {first, second}
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


def test_a_hard_link_elsewhere_keeps_its_text(tree: Path, tmp_path: Path) -> None:
    """Package managers share one copy of a file between environments."""
    os.link(tree / ZARR, tmp_path / "cache.py")
    apply(tree, ZARR_FIX)
    assert (tmp_path / "cache.py").read_text() == ZARR_TEXT


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
    ours = [path for path in snapshot(tree) if path.startswith(inplace.STATE_FOLDER)]
    assert ours
    assert all(path in listed for path in ours)  # an uninstall of megatron-core takes them along


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
    """Both start from the originals: what is written back would be garbage."""
    apply(tree)
    backup = inplace.state_folder(tree, CORE) / "originals" / ZARR
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
    with pytest.raises(UserError, match=r"zarr\.py: expected UTF-8.*nothing was changed"):
        apply(tree)
    assert snapshot(tree) == before


def test_a_damaged_state_is_refused(tree: Path) -> None:
    apply(tree)
    state = inplace.state_folder(tree, CORE) / "state.json"
    state.write_text('{"version": 99}')
    with pytest.raises(UserError, match="expected version 1 of our state"):
        revert(tree)


def without_rights() -> list[str]:
    """As root, drop the right to write anywhere."""
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--reuid=65534", "--regid=65534", "--clear-groups"]


@pytest.mark.skipif(os.geteuid() != 0, reason="drops root's rights")
def test_a_read_only_tree_is_one_clear_line(tree: Path, tmp_path: Path) -> None:
    for folder in [tmp_path, *tmp_path.parents[:3]]:
        folder.chmod(folder.stat().st_mode | 0o055)
    command = [*without_rights(), sys.executable, "-m", "ckpt_patches", "apply", "--tree", str(tree), PRODUCT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "no permission to write there; nothing was changed" in line


# Crashes and company


class Killed(BaseException):
    """The process ends here."""


def test_a_crash_at_any_write_leaves_a_tree_that_the_next_run_puts_right(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(tree)
    replace, crashes = os.replace, 0
    for at in range(100):
        calls = 0

        def crash(source: Path, target: Path, at: int = at) -> None:
            nonlocal calls
            calls += 1
            if calls == at + 1:
                raise Killed
            replace(source, target)

        monkeypatch.setattr("ckpt_patches.transaction.os.replace", crash)
        try:
            apply(tree)
        except Killed:
            crashes += 1
        else:
            break
        finally:
            monkeypatch.setattr("ckpt_patches.transaction.os.replace", replace)
        assert revert(tree) == []  # the next run recovers first
        assert snapshot(tree) == before, f"crash at write {at}"
    assert crashes > 5
    assert set(inplace.read_state(tree, CORE).fixes) == {PRODUCT, ZARR_FIX}


def test_a_full_disk_changes_nothing(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(tree)
    write, calls = transaction.write_durably, 0

    def full(path: Path, data: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise OSError(28, "No space left on device", str(path))
        write(path, data)

    monkeypatch.setattr(transaction, "write_durably", full)
    with pytest.raises(UserError, match="No space left on device; nothing was changed"):
        apply(tree)
    assert snapshot(tree) == before


def test_a_kill_at_any_moment_leaves_whole_files(tree: Path) -> None:
    before = snapshot(tree)
    command = [sys.executable, "-m", "ckpt_patches", "apply", "--tree", str(tree)]
    for delay in (0.02, 0.05, 0.08, 0.1, 0.12, 0.15, 0.2):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for path in (tree / ZARR, tree / DIST_INFO / "RECORD"):
            assert path.read_bytes().endswith(b"\n")
        revert(tree)
        assert snapshot(tree) == before


def test_two_at_once_take_turns(tree: Path) -> None:
    command = [sys.executable, "-m", "ckpt_patches"]
    both = [[*command, "apply", "--tree", str(tree), name] for name in (PRODUCT, ZARR_FIX)] * 3
    processes = [subprocess.Popen(arguments, stderr=subprocess.PIPE) for arguments in both]
    assert [process.wait() for process in processes] == [0] * 6
    assert set(inplace.read_state(tree, CORE).fixes) == {PRODUCT, ZARR_FIX}
    revert(tree)
    assert (tree / ZARR).read_text() == ZARR_TEXT
