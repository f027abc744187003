"""One writer at a time in a tree that several hosts share, where a folder's lock excludes no other host."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from ckpt_patches.engine import installed
from ckpt_patches.engine.registry import CORE
from ckpt_patches.errors import UserError
from ckpt_patches.inplace import rewrite, tree_lock
from installed_tree import apply, make_installed, revert, snapshot
from upstream import TIMEOUT

# The command as on a host of that name, without locks on folders.
ON_HOST = """
import fcntl, sys, time
from ckpt_patches import cli
from ckpt_patches.inplace import tree_lock
host, at, *arguments = sys.argv[1:]
fcntl.flock = lambda *_: None
tree_lock._host = lambda: host
time.sleep(max(0, float(at) - time.time()))
sys.exit(cli.main(arguments))
"""
BOTH = ("numpy2_product", "zarr_create_synchronizer")  # fixes that the tree needs


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_installed(tmp_path / "site-packages")


def on_host(host: str, at: float, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ON_HOST, host, str(at), *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def lock(tree: Path, holder: tree_lock.Holder) -> Path:
    path = tree / installed.STATE_FOLDER / tree_lock.NAME
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(holder)))
    return path


@contextlib.contextmanager
def process() -> Iterator[int]:
    running = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        yield running.pid
    finally:
        running.communicate()


def test_two_hosts_at_once_leave_one_result(tree: Path) -> None:
    before = snapshot(tree)
    apply(tree)
    applied = snapshot(tree)
    revert(tree)
    for _ in range(3):
        at = time.time() + 3
        both = [on_host(host, at, "apply", *BOTH, "--tree", str(tree)) for host in ("one", "two")]
        said = [process.communicate(timeout=TIMEOUT)[1] for process in both]
        assert [process.returncode for process in both] == [0, 0], said
        assert snapshot(tree) == applied
        both = [on_host(host, at, "revert", "--tree", str(tree)) for host in ("one", "two")]
        assert [process.communicate(timeout=TIMEOUT) and process.returncode for process in both] == [0, 0]
        assert snapshot(tree) == before


@pytest.mark.parametrize("start", ["", "1"])
def test_the_lock_of_a_process_of_this_host_that_has_ended_is_taken_over(
    start: str, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a lock is taken over, also if another process has its PID now."""
    with process() as other:
        number = other
        if start:
            path = lock(tree, tree_lock.Holder(tree_lock._host(), number, start))
            apply(tree)
    if not start:
        path = lock(tree, tree_lock.Holder(tree_lock._host(), number, "1"))
        apply(tree)
    said = capsys.readouterr().err
    assert f"took over {path}: process {number} of {tree_lock._host()}, which made it, has ended" in said
    assert not path.exists()
    assert len(rewrite.read_state(tree, CORE).fixes) == 2


def test_the_lock_of_another_host_is_refused_until_it_is_deleted(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_lock, "PATIENCE", 0.2)
    before = snapshot(tree)
    path = lock(tree, tree_lock.Holder("another host", 1, "1"))
    for change in (apply, revert):
        with pytest.raises(UserError) as refused:
            change(tree)
        for word in (
            str(path),
            "process 1 of another host",
            "nothing was changed",
            "if it has ended, delete that file",
        ):
            assert word in str(refused.value)
    assert path.exists()
    assert {name: text for name, text in snapshot(tree).items() if "lock" not in name} == before
    path.unlink()
    apply(tree)
    assert len(rewrite.read_state(tree, CORE).fixes) == 2


def test_a_live_process_of_this_host_is_waited_for(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the process has no time limit."""
    monkeypatch.setattr(tree_lock, "PATIENCE", 0.2)
    with process() as other:
        path = lock(tree, tree_lock.Holder(tree_lock._host(), other, tree_lock._start(other)))
        running = subprocess.Popen([sys.executable, "-m", "ckpt_patches", "apply", *BOTH, "--tree", str(tree)])
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(timeout=5)
        path.unlink()
        assert running.wait(timeout=TIMEOUT) == 0


def test_a_lock_without_a_name_is_of_a_process_unknown(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_lock, "PATIENCE", 0.2)
    lock(tree, tree_lock.Holder("", 0, "")).write_text("")
    with pytest.raises(UserError, match="of a process unknown"):
        apply(tree)


def test_a_file_system_without_links_has_a_lock_as_well(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", no_links)
    before = snapshot(tree)
    with tree_lock.held(tree, tree / installed.STATE_FOLDER):
        assert tree_lock._holder(tree / installed.STATE_FOLDER / tree_lock.NAME) == tree_lock._this_process()
    apply(tree)
    revert(tree)
    assert snapshot(tree) == before


# Switches


def test_a_skipped_fix_is_not_applied_and_one_that_is_is_told(tree: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "ckpt_patches", *arguments, "--tree", str(tree)]
        done = subprocess.run(
            command, env={"CKPT_PATCHES_SKIP": "numpy2_product,zarr_range_write"}, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr

    for names in ([], ["numpy2_product", "zarr_create_synchronizer"]):
        status, said = run("apply", *names)
        assert (status, "numpy2_product: not applied (CKPT_PATCHES_SKIP)" in said) == (0, True)
        assert rewrite.read_state(tree, CORE).fixes == ("zarr_create_synchronizer",)
    assert "in CKPT_PATCHES_SKIP, and applied" not in run("status")[1]
    apply(tree)
    status, said = run("status")
    assert "warning: numpy2_product is in CKPT_PATCHES_SKIP, and applied in place: ckpt-patches revert" in said
    assert "numpy2_product: applied in place by an earlier run, revert it (CKPT_PATCHES_SKIP)" in run("apply")[1]
