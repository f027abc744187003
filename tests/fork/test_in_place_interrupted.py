"""apply and revert, killed or with a disk error at each change that they make: the next one completes it."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_patches.engine.registry import CORE
from ckpt_patches.errors import UserError
from file_changes import Act, before_each_change, in_child
from installed_tree import (
    EDITED,
    NAMES,
    OURS,
    SAME_FILE,
    ZARR,
    Everything,
    apply,
    everything,
    folder_in_memory,
    make_installed,
    of_the_package,
    revert,
)

# By name: the fixes that are applied before, the change, and the fixes that it is for.
KINDS: dict[str, tuple[tuple[str, ...], Callable[..., object], tuple[str, ...]]] = {
    "apply": ((), apply, NAMES),
    "revert": (NAMES, revert, NAMES),
    "apply one more": (SAME_FILE[:1], apply, SAME_FILE[1:]),
    "revert one of two": (SAME_FILE, revert, SAME_FILE[:1]),
}
MOST = 400  # far more changes than apply or revert make
LINKED = EDITED[0]  # a symbolic link


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture
def plain(folder: Path) -> Path:
    """A tree without fixes, with a link, and with bytecode that would hide an edit."""
    root = make_installed(folder / "plain")
    (root / ZARR).chmod(0o640)
    (root / LINKED).rename(folder / "cache.py")
    (root / LINKED).symlink_to(folder / "cache.py")
    compile_ = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    subprocess.run([*compile_, str(root / "megatron")], check=True)
    return root


def copied(root: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(root, to, symlinks=True)
    return to


class Trees:
    """A kind of change: the tree before and after it."""

    def __init__(self, kind: str, plain: Path) -> None:
        applied, self._change, self._names = KINDS[kind]
        self.plain, self.before, self.root = plain, copied(plain, plain.with_name("before")), plain.with_name("tree")
        if applied:
            apply(self.before, *applied)
        self.after = copied(self.before, plain.with_name("after"))
        self.change(self.after)
        self.old, self.new = everything(self.before), everything(self.after)
        assert self.old != self.new
        self.all_applied = everything(self._with_all())
        self.all_reverted = everything(plain)

    def _with_all(self) -> Path:
        root = copied(self.plain, self.root)
        apply(root)
        return root

    def start(self) -> Path:
        return copied(self.before, self.root)

    def change(self, root: Path) -> None:
        self._change(root, *self._names)

    def check_files(self, root: Path) -> bool:
        """Check that each file is old or new; return whether they are mixed."""
        found, old, new = map(of_the_package, (everything(root), self.old, self.new))
        assert found.keys() == old.keys() == new.keys()
        assert all(found[path] in (old[path], new[path]) for path in found)
        assert_no_old_bytecode(root, found, old)
        return found not in (old, new)

    def check_completions(self, root: Path) -> None:
        """Check that each of the next runs completes the change."""
        for run, end in self.completions():
            other = copied(root, root.with_name("other"))
            run(other)
            assert everything(other) == end

    def completions(self) -> list[tuple[Callable[[Path], object], Everything]]:
        """The same change again, and all of both kinds, with what each leaves."""
        return [(self.change, self.new), (apply, self.all_applied), (revert, self.all_reverted)]


def assert_no_old_bytecode(root: Path, found: Everything, old: Everything) -> None:
    """No bytecode with an unchecked hash may hide a new text."""
    for path in EDITED:
        if found[path] != old[path]:
            assert list((root / path).parent.glob(f"__pycache__/{Path(path).stem}.*")) == []


def events_of(act: Act) -> None:
    """Call `act` before each change and each fsync in this process."""
    before_each_change(act)
    os.fsync = lambda descriptor: act("os.fsync", (os.readlink(f"/proc/self/fd/{descriptor}"),))  # type: ignore[assignment]


# Kills


def killed_at(change: Callable[[Path], object], root: Path, point: int) -> bool:
    """Kill a child just before its change number `point`, from 0; return whether it got there."""

    def run() -> None:
        left = point

        def act(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        events_of(act)
        change(root)

    status, _ = in_child(run)
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_change_of_the_file_system(kind: str, plain: Path) -> None:
    trees = Trees(kind, plain)
    mixed = []
    for point in range(MOST):
        root = trees.start()
        killed = killed_at(trees.change, root, point)
        mixed.append(trees.check_files(root))
        trees.check_completions(root)
        if not killed:
            break
    assert not killed
    assert everything(root) == trees.new
    assert len(mixed) > 20
    assert any(mixed) == (len([path for path in trees.old if trees.old[path] != trees.new.get(path)]) > 1)


@pytest.mark.parametrize("kind", ["apply", "revert"])
def test_a_run_that_completes_a_killed_one_can_be_killed_as_well(kind: str, plain: Path) -> None:
    trees = Trees(kind, plain)
    half = copied(trees.before, plain.with_name("half"))
    point = 0
    while not trees.check_files(half):
        point += 1
        killed_at(trees.change, copied(trees.before, half), point)
    for run, _ in trees.completions():
        for second in range(0, MOST, 7):
            root = copied(half, trees.root)
            killed = killed_at(run, root, second)
            apply(root)
            assert everything(root) == trees.all_applied
            revert(root)
            assert everything(root) == trees.all_reverted
            if not killed:
                break
        assert not killed
        assert second > 5


# Errors of the disk


def attempt(change: Callable[[Path], object], root: Path) -> str:
    """The message to the user; empty on success."""
    try:
        change(root)
    except UserError as error:
        return str(error)
    return ""


def failed_at(
    change: Callable[[Path], object], root: Path, point: int, number: int, *, lasting: bool, counts: Callable[..., bool]
) -> tuple[str, bool]:
    """Make a call fail, or all from that one on; return the user's message, and whether that call was reached."""

    def run() -> tuple[str, bool]:
        left = point

        def act(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            if counts(event, arguments):
                left -= 1
                if left == -1 or (lasting and left < 0):
                    raise OSError(number, os.strerror(number), str(arguments[0]))

        events_of(act)
        return attempt(change, root), left < 0

    message, reached = in_child(run)[1]
    return message, reached


def needs_space(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a call needs disk space: writes and new names do; a rename over a file does not."""
    if event == "os.fsync":
        return os.path.isfile(arguments[0])
    return event in ("open", "os.mkdir", "os.symlink")


def always(event: str, arguments: tuple[Any, ...]) -> bool:
    """All but the removal of an empty folder, which the next run removes."""
    return event != "os.rmdir"


ERRORS = {
    "ENOSPC from then on": (errno.ENOSPC, True, needs_space),
    "EIO once": (errno.EIO, False, always),
    "EIO from then on": (errno.EIO, True, always),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", ["apply", "revert"])
def test_an_error_at_any_call_is_one_line_and_loses_nothing(kind: str, error: str, plain: Path) -> None:
    trees = Trees(kind, plain)
    number, lasting, counts = ERRORS[error]
    for point in range(MOST):
        root = trees.start()
        message, reached = failed_at(trees.change, root, point, number, lasting=lasting, counts=counts)
        assert (os.strerror(number) in message) == reached
        assert "\n" not in message
        if message:
            is_unchanged = message.endswith(f"; nothing of {CORE} was changed")
            assert is_unchanged or message.endswith("may be changed in part: the next apply or revert completes it")
            assert not is_unchanged or everything(root) == trees.old
        is_mixed = trees.check_files(root)
        if number == errno.ENOSPC:  # space is taken before the first rename of a file of the package, and given back
            assert not is_mixed
            assert [path for path in everything(root) if Path(path).suffix == ".ckpt-patches"] == []
        trees.change(root)
        assert everything(root) == trees.new
        revert(root)
        assert everything(root) == trees.all_reverted
        if not reached:
            break
    assert not reached
    assert point > 5


def test_a_rename_that_fails_though_it_was_made_is_no_failure(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS reports failure if the reply was lost."""
    trees = Trees("apply", plain)
    root, replace = trees.start(), os.replace
    lost = []

    def once(source: Path, target: Path) -> None:
        replace(source, target)
        if target == root / ZARR and not lost:
            lost.append(target)
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(source))

    monkeypatch.setattr(os, "replace", once)
    apply(root)
    assert lost
    assert everything(root) == trees.new


# The order of writes on the disk


@pytest.mark.parametrize("kind", KINDS)
def test_the_disk_has_what_a_step_stands_on_before_the_step(kind: str, plain: Path) -> None:
    """A power loss keeps only synced data.

    Our folder is synced before bytecode is removed, that before a file gets a new text, and that before an original or
    the state goes. Each file is synced before it gets its name.
    """
    trees = Trees(kind, plain)
    root = trees.start()

    def run() -> list[list[str]]:
        events: list[list[str]] = []
        events_of(lambda event, arguments: events.append([event, *(str(part) for part in arguments[:2])]))
        trees.change(root)
        return events

    areas = ""
    unsynced: set[str] = set()
    for event, path, *more in in_child(run)[1]:
        if event == "os.fsync":
            unsynced.discard(path)
        elif event == "open":
            unsynced.add(path)
        elif event == "os.rename" or (event == "os.remove" and not path.endswith(".ckpt-patches")):
            target = more[0] if event == "os.rename" else path
            assert event == "os.remove" or path not in unsynced
            if area_of(target, root) != areas[-1:]:
                areas += area_of(target, root)
                assert not unsynced
            unsynced.add(os.path.dirname(target))
    assert areas == ("obfo" if kind == "apply" else "ofo")
    assert unsynced <= {str(root / OURS)}  # after the state is gone


def area_of(path: str, root: Path) -> str:
    """Our folder, bytecode, or files of the package."""
    return "o" if path.startswith(str(root / OURS)) else "b" if path.endswith(".pyc") else "f"
