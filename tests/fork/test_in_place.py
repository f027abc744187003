"""apply and revert: exact to the byte, one by one, one at a time, and consistent with pip's RECORD."""

import csv
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_patches.engine.registry import CORE
from ckpt_patches.errors import UserError
from ckpt_patches.inplace import rewrite
from installed_tree import (
    DIST_INFO,
    EDITED,
    NAMES,
    OURS,
    PRODUCT,
    ZARR,
    ZARR_FIX,
    ZARR_TEXT,
    apply,
    everything,
    folder_in_memory,
    make_installed,
    of_the_package,
    record_row,
    revert,
)
from small_tree import IS_PATCHED, command, python

STATE, RECORD = f"{OURS}/state.json", f"{DIST_INFO}/RECORD"


@pytest.fixture
def in_memory() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture
def tree(in_memory: Path) -> Path:
    return make_installed(in_memory / "site-packages")


def test_apply_and_revert_leave_every_byte_and_mode_as_it_was(tree: Path) -> None:
    (tree / ZARR).chmod(0o640)
    before = everything(tree)
    assert sorted(apply(tree)) == sorted(NAMES)
    after = everything(tree)
    assert {path for path in before if before[path] != after[path]} == {*EDITED, RECORD}
    assert after[ZARR][1] == before[ZARR][1]
    assert sorted(revert(tree)) == sorted(NAMES)
    assert everything(tree) == before


def test_both_are_idempotent(tree: Path) -> None:
    apply(tree)
    once, times = everything(tree), {path: path.stat().st_mtime_ns for path in tree.rglob("*") if path.is_file()}
    assert sorted(apply(tree)) == sorted(NAMES)
    assert everything(tree) == once
    assert times == {path: path.stat().st_mtime_ns for path in tree.rglob("*") if path.is_file()}
    revert(tree)
    assert revert(tree) == []


def test_files_that_were_replaced_do_not_have_the_fixes(tree: Path) -> None:
    apply(tree)
    assert sorted(rewrite.in_place(tree, CORE).fixes) == sorted(NAMES)
    (tree / ZARR).write_text("def another(): pass\n")
    assert rewrite.in_place(tree, CORE) == rewrite.State()


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]])
def test_fixes_come_and_go_one_by_one(tree: Path, order: tuple[str, ...]) -> None:
    """Two of them edit one file."""
    states = [everything(tree)]
    for name in order:
        apply(tree, name)
        states.append(everything(tree))
    for name in reversed(order):
        assert everything(tree) == states.pop()
        assert revert(tree, name) == [name]
    assert everything(tree) == states.pop()


def test_the_edited_files_run_without_the_hook_and_revert_undoes_it(tree: Path) -> None:
    """Also where bytecode with an unchecked hash would run the old text."""

    def is_patched() -> str:
        return python("-c", IS_PATCHED, tree=tree, env={"CKPT_PATCHES": "off"}).stdout.strip()

    def compile_all() -> None:
        mode = ["--invalidation-mode", "unchecked-hash"]
        subprocess.run([sys.executable, "-m", "compileall", "-q", *mode, str(tree / "megatron")], check=True)

    compile_all()
    assert is_patched() == "False"
    apply(tree, PRODUCT)
    assert is_patched() == "True"
    compile_all()
    revert(tree)
    assert is_patched() == "False"


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


def test_a_hard_link_elsewhere_keeps_its_text(tree: Path, in_memory: Path) -> None:
    """Another environment's hard link, as package managers make it, keeps its text."""
    os.link(tree / ZARR, in_memory / "cache.py")
    apply(tree, ZARR_FIX)
    assert (in_memory / "cache.py").read_text() == ZARR_TEXT


@pytest.mark.parametrize("target", ["../../../../../cache.py", "{}/cache.py"], ids=["relative", "absolute"])
def test_a_symbolic_link_is_one_again_and_what_it_leads_to_keeps_its_text(
    tree: Path, in_memory: Path, target: str
) -> None:
    """A package manager's link into its cache: the cache never changes."""
    (tree / ZARR).rename(in_memory / "cache.py")
    (tree / ZARR).symlink_to(target.format(in_memory))
    (tree / RECORD).rename(in_memory / "RECORD")
    (tree / RECORD).symlink_to(in_memory / "RECORD")
    record, before = (in_memory / "RECORD").read_bytes(), everything(tree)
    apply(tree)
    assert "synchronizer=" in (tree / ZARR).read_text()
    apply(tree, PRODUCT)
    revert(tree, PRODUCT)
    assert "synchronizer=" in (tree / ZARR).read_text()
    assert (in_memory / "cache.py").read_text() == ZARR_TEXT
    assert (in_memory / "RECORD").read_bytes() == record
    (in_memory / "cache.py").write_text("of a later release\n")  # which the tree would have without us as well
    revert(tree)
    assert everything(tree) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_what_root_applies_stays_the_property_of_its_owner(tree: Path) -> None:
    """Files keep their owner, who could not read a private file of root."""
    os.chown(tree / ZARR, 65534, 65534)
    (tree / ZARR).chmod(0o600)
    before = everything(tree)
    apply(tree)
    for path in (tree / ZARR, tree / OURS / "originals" / ZARR):
        assert (path.stat().st_uid, path.stat().st_gid, path.stat().st_mode & 0o777) == (65534, 65534, 0o600)
    revert(tree)
    assert everything(tree) == before


def test_a_folder_of_the_tree_may_be_on_another_file_system(tree: Path, tmp_path: Path) -> None:
    """A checkout that is linked, or mounted, into site-packages."""
    if tree.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    elsewhere = tmp_path / "megatron"
    shutil.move(tree / "megatron", elsewhere)
    (tree / "megatron").symlink_to(elsewhere)
    before = everything(tree), everything(elsewhere)
    apply(tree)
    assert everything(elsewhere) != before[1]
    revert(tree)
    assert (everything(tree), everything(elsewhere)) == before


# RECORD, and what an uninstall finds


def test_record_stays_true(tree: Path) -> None:
    """Rows of edited files are right, and an uninstall of megatron-core removes our files with it."""

    def wrong() -> list[str]:
        with open(tree / RECORD, newline="") as file:
            rows = [row for row in csv.reader(file) if row]
        missing = [row[0] for row in rows if not (tree / row[0]).exists()]
        hashed = [row for row in rows if row[1] and (tree / row[0]).exists()]
        return missing + [row[0] for row in hashed if ",".join(row) != record_row(tree, tree / row[0])]

    assert wrong() == []
    for names in (NAMES[:1], NAMES):
        apply(tree, *names)
        assert wrong() == []
        ours = [path for path in everything(tree) if path.startswith(OURS) and (tree / path).is_file()]
        assert {f"{OURS}/README.txt", STATE, f"{OURS}/.gitignore"} < set(ours)
        rows = (tree / RECORD).read_text().splitlines()
        assert sorted(row for row in rows if row.startswith(OURS)) == sorted(f"{path},," for path in ours)


ODD: dict[str, Callable[[bytes], bytes]] = {
    "line feeds": lambda record: record.replace(b"\r\n", b"\n"),
    "no end of the last line": bytes.rstrip,
    "a row twice": lambda record: record + record.splitlines(keepends=True)[0],
    "another digest": lambda record: record.replace(b"zarr.py,sha256=", b"zarr.py,md5="),
    "a path that is no UTF-8": lambda record: record + b"caf\xe9\x85.py,,\r\n",
    "nothing": lambda record: b"",
}


@pytest.mark.parametrize("kind", ODD)
def test_revert_restores_every_byte_of_an_odd_record(tree: Path, kind: str) -> None:
    (tree / RECORD).write_bytes(ODD[kind]((tree / RECORD).read_bytes()))
    before = everything(tree)
    apply(tree)
    assert everything(tree)[RECORD] != before[RECORD]
    revert(tree)
    assert everything(tree) == before


def test_a_file_in_the_tree_says_what_is_left_when_we_are_uninstalled(tree: Path) -> None:
    apply(tree)
    note = (tree / OURS / "README.txt").read_text()
    for words in (
        "training-checkpoint-patches",
        "has edited files of megatron-core",
        "uninstall",
        "ckpt-patches revert",
    ):
        assert words in note


# Refusals


def refused(change: Callable[..., object], tree: Path, *names: str) -> str:
    """The message of a refused change, which has changed nothing."""
    before = everything(tree)
    with pytest.raises(UserError) as error:
        change(tree, *names)
    assert everything(tree) == before
    said = str(error.value)
    assert "\n" not in said
    assert len(said) < 1000
    assert said.endswith(f"; nothing of {CORE} was changed")
    return said


def edit_state(edit: Callable[[Any], object]) -> Callable[[Path], object]:
    def damage(tree: Path) -> None:
        state = json.loads((tree / STATE).read_text())
        edit(state)
        (tree / STATE).write_text(json.dumps(state))

    return damage


def edit_file(**values: object) -> Callable[[Path], object]:
    return edit_state(lambda state: state["files"][0].update(values))


def write_state(text: bytes) -> Callable[[Path], object]:
    return lambda tree: (tree / STATE).write_bytes(text)


FOREIGN = f"TREE/{ZARR} changed since the fixes were applied. Put it back, or delete TREE/{OURS} to keep it"
ANEW = f"Reinstall megatron-core, or restore it in a checkout, and delete TREE/{OURS}"
BACKUP = f"{OURS}/originals/{ZARR}"
ORIGINAL = f"expected the original of TREE/{ZARR} in TREE/{BACKUP}, found another text. {ANEW}"
NO_STATE = f"expected our state in TREE/{STATE}, found .*{ANEW}"
INTERRUPTED = "an interrupted change of version 0.2, whose apply or revert completes it"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file edited by hand": (lambda tree: (tree / ZARR).write_text("by hand"), FOREIGN),
    "a file removed": (lambda tree: (tree / ZARR).unlink(), FOREIGN),
    "an original damaged": (lambda tree: (tree / BACKUP).write_text("garbage = 1\n"), ORIGINAL),
    "an original lost": (lambda tree: (tree / BACKUP).unlink(), ORIGINAL),
    "originals without a state": (lambda tree: (tree / STATE).unlink(), NO_STATE),
    "an interrupted change of 0.2": (lambda tree: (tree / OURS / "journal.json").touch(), f".*{INTERRUPTED}.*{ANEW}"),
    "an unknown fix": (
        edit_state(lambda state: state["fixes"].append("of_tomorrow\n" * 1000)),
        ".*of_tomorrow.* would be lost, as it is .*unknown to this version: revert it with the one that applied it",
    ),
    "a later version": (edit_state(lambda state: state.update(version=99)), NO_STATE),
    "no version": (edit_state(lambda state: state.pop("version")), NO_STATE),
    "no files": (edit_state(lambda state: state.update(files=None)), NO_STATE),
    "an odd file": (edit_file(more="x"), NO_STATE),
    "a path out of the tree": (edit_file(path="../other"), NO_STATE),
    "an absolute path": (edit_file(path="/etc/hostname"), NO_STATE),
    "the tree": (edit_file(path=""), NO_STATE),
    "a number for a path": (edit_file(path=7), NO_STATE),
    "a number for a link": (edit_file(link=7), NO_STATE),
    "an empty state": (write_state(b""), NO_STATE),
    "a list": (write_state(b"[]"), NO_STATE),
    "a deep list": (write_state(b"[" * 100_000), NO_STATE),
    "no UTF-8": (write_state(b"\xff"), NO_STATE),
}


@pytest.mark.parametrize("change", [apply, revert])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_somebody_else_has_changed_is_refused(tree: Path, change: Callable[..., object], damage: str) -> None:
    """Also our own files: a tree with them may come from somebody else."""
    apply(tree)
    make, message = DAMAGES[damage]
    make(tree)
    assert re.match(message.replace("TREE", str(tree)), refused(change, tree))


@pytest.mark.parametrize("change", [apply, revert])
def test_a_file_that_has_its_original_text_again_is_no_foreign_text(tree: Path, change: Callable[..., object]) -> None:
    """`git checkout FILE`, or a reinstall that leaves our folder."""
    before = everything(tree)
    apply(tree)
    applied = everything(tree)
    (tree / ZARR).write_text(ZARR_TEXT)
    change(tree)
    assert everything(tree) == (applied if change is apply else before)


@pytest.mark.parametrize("change", [apply, revert])
def test_an_applied_fix_that_fits_no_more_is_not_removed_silently(tree: Path, change: Callable[..., object]) -> None:
    """A fix that no longer matches the originals, as after our upgrade, is an error; to revert it is none."""
    before = everything(tree)
    apply(tree)
    edit_state(lambda state: state["fixes"].append("fully_reshardable_shift"))(tree)
    assert "['fully_reshardable_shift'] is applied in place and would be lost" in refused(change, tree, PRODUCT)
    revert(tree, *NAMES, "fully_reshardable_shift")
    assert everything(tree) == before


def test_unreadable_text_is_refused(tree: Path) -> None:
    (tree / ZARR).write_bytes((tree / ZARR).read_bytes() + b"x = '\xe9'\n")
    assert "zarr.py: expected UTF-8" in refused(apply, tree)


def without_rights() -> list[str]:
    """The command prefix that drops root's right to write anywhere."""
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--reuid=65534", "--regid=65534", "--clear-groups"]


@pytest.mark.skipif(os.geteuid() != 0, reason="drops root's rights")
def test_a_read_only_tree_is_one_clear_line(tree: Path, in_memory: Path) -> None:
    in_memory.chmod(0o755)
    if subprocess.run([*without_rights(), sys.executable, "-c", ""], capture_output=True).returncode != 0:
        pytest.skip("nobody but root may run this Python")
    command = [*without_rights(), sys.executable, "-m", "ckpt_patches", "apply", "--tree", str(tree), PRODUCT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "no permission to write there; nothing of megatron.core was changed" in line


# Version 0.2


def as_by_0_2(tree: Path, keys: tuple[str, ...] = ("version", "fixes", "files", "functions")) -> None:
    """Turn our folder and RECORD into those of version 0.2; 0.2.0 had no functions."""
    state = json.loads((tree / STATE).read_text())
    state["version"] = 1
    for file in state["files"]:
        del file["before"]
    (tree / STATE).write_text(json.dumps({key: state[key] for key in keys}, indent=1))
    (tree / OURS / "README.txt").unlink()
    lines = (tree / RECORD).read_bytes().decode().splitlines(keepends=True)
    own = [line for line in lines if line.startswith(OURS) and "README" not in line]
    (tree / RECORD).write_bytes("".join([line for line in lines if not line.startswith(OURS)] + own).encode())


@pytest.mark.parametrize("keys", [("version", "fixes", "files"), ("version", "fixes", "files", "functions")])
def test_what_version_0_2_has_applied_is_reverted_and_continued(tree: Path, keys: tuple[str, ...]) -> None:
    before = everything(tree)
    apply(tree)
    applied = everything(tree)
    as_by_0_2(tree, keys)
    assert sorted(rewrite.read_state(tree, CORE).fixes) == sorted(NAMES)
    assert sorted(revert(tree)) == sorted(NAMES)
    assert everything(tree) == before
    apply(tree)
    as_by_0_2(tree, keys)
    apply(tree)
    assert everything(tree) == applied


# Several at once


def test_a_second_process_of_this_host_waits(tree: Path) -> None:
    descriptor = os.open(tree, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    command = [sys.executable, "-m", "ckpt_patches", "apply", PRODUCT, "--tree", str(tree)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)
    assert of_the_package(everything(tree)) == everything(tree)
    os.close(descriptor)
    assert process.wait() == 0
    assert rewrite.read_state(tree, CORE).fixes == (PRODUCT,)


def test_hosts_without_a_common_lock_end_in_the_same_text(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each apply or revert ends while another one is about to write."""
    before = everything(tree)
    apply(tree)
    after = everything(tree)
    revert(tree)
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    for _ in range(3):
        at_once(4, apply, tree)
        assert everything(tree) == after
        at_once(4, revert, tree)
        assert everything(tree) == before


def at_once(count: int, run: Callable[[Path], object], tree: Path) -> None:
    """Run a function in this many forked processes."""
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            try:
                run(tree)
            except BaseException as error:
                os.write(2, f"{error!r}\n".encode())
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * count


# The command


def test_the_command_says_what_it_has_done(tree: Path) -> None:
    def said(*arguments: str, skip: str = "") -> list[str]:
        done = command(*arguments, "--tree", str(tree), CKPT_PATCHES_SKIP=skip)
        assert done.returncode == 0
        return done.stderr.splitlines()

    both = (PRODUCT, ZARR_FIX)
    skipped = "not applied (CKPT_PATCHES_SKIP)"
    note = "ckpt-patches: ckpt-patches status shows the result; ckpt-patches revert undoes it, pip uninstall does not"

    def of_all(text: str) -> str:
        return f"ckpt-patches: megatron-core: {text} ({tree})"

    first = [f"{ZARR_FIX}: applied", f"{PRODUCT}: {skipped}", of_all(f"1 applied, 1 {skipped}"), note]
    assert said("apply", *both, skip=PRODUCT) == first
    assert rewrite.read_state(tree, CORE).fixes == (ZARR_FIX,)
    *lines, last = said("apply", *both)
    assert (sorted(lines), last) == (
        sorted([f"{PRODUCT}: applied", f"{ZARR_FIX}: already there", of_all("1 applied, 1 already there")]),
        note,
    )
    *lines, last = said("apply", *both)
    assert sorted(lines) == [f"{PRODUCT}: already there", f"{ZARR_FIX}: already there"]
    assert last == of_all("2 already there")
    in_place = f"{PRODUCT}: {skipped}: it is applied in place, by an earlier run: revert it"
    assert in_place in said("apply", *both, skip=PRODUCT)
    status = command("status", on=tree, CKPT_PATCHES_SKIP=PRODUCT).stdout
    assert f"warning: {PRODUCT} is in CKPT_PATCHES_SKIP, and applied in place: ckpt-patches revert" in status
    assert said("revert", *both) == [f"{PRODUCT}: reverted", f"{ZARR_FIX}: reverted", of_all("2 reverted")]
    assert said("revert", PRODUCT) == [f"{PRODUCT}: was not applied in place", of_all("1 was not applied in place")]
