"""apply and revert, killed or with a disk error at each change that they make, change all or nothing."""

import contextlib
import errno
import hashlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_patches.engine import installed
from ckpt_patches.engine.registry import CORE
from ckpt_patches.errors import UserError
from ckpt_patches.inplace import transaction, tree_lock
from file_changes import Act, before_each_change, in_child
from installed_tree import ZARR, apply, everything, make_installed, revert, snapshot
from upstream import all_releases

pytestmark = pytest.mark.long

BOTH = {"apply": apply, "revert": revert}
KEPT = ".ckpt-patches-before"
MOST = 300  # far more changes than apply or revert make
SOME = 1 if all_releases() else 3  # step between points in the default run, where another test takes all


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if possible: tests create about ten thousand small files."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A tree to apply to, with bytecode that would hide the edit, one to revert, and one reverted."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a kill loses nothing that the kernel has
    trees = {name: tmp_path / "templates" / name for name in ("apply", "revert", "reverted")}
    make_installed(trees["apply"])
    (trees["apply"] / ZARR).chmod(0o640)
    compile_ = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    subprocess.run([*compile_, str(trees["apply"] / "megatron")], check=True)
    shutil.copytree(trees["apply"], trees["revert"])
    apply(trees["revert"])
    shutil.copytree(trees["revert"], trees["reverted"])
    revert(trees["reverted"])
    return trees


def copied(template: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(template, to, symlinks=True)
    return to


def of_the_package(root: Path) -> dict[str, tuple[bytes, int]]:
    """Upstream's files and RECORD, with text and mode."""
    return {path: found for path, found in snapshot(root).items() if "ckpt-patches" not in path}


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


def no_links(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("links", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["links", "no links"])
@pytest.mark.parametrize("name", BOTH)
def test_killed_at_any_change_of_the_file_system(
    name: str, links: bool, templates: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is complete, and the next apply or revert repairs the tree, also after a move."""
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    old, new = of_the_package(templates["apply"]), of_the_package(templates["revert"])
    reverted = [everything(templates["apply"]), everything(templates["reverted"])]
    applied = everything(templates["revert"])
    halves = 0
    for point in range(0, MOST, 1 if links else SOME):
        root = copied(templates[name], tmp_path / "tree")
        killed = killed_at(BOTH[name], root, point)
        found = of_the_package(root)
        assert found.keys() == old.keys()
        assert all(found[path] in (old[path], new[path]) for path in found), f"killed at {point}"
        halves += found not in (old, new)
        moved = copied(root, tmp_path / "moved")
        apply(moved)
        assert everything(moved) == applied, f"killed at {point}"
        revert(root)
        assert everything(root) in reverted, f"killed at {point}"
        if not killed:
            break
    assert not killed
    assert point > 40
    assert halves > (1 if links else 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_a_run_that_ends_an_interrupted_one_can_be_killed_as_well(
    name: str, templates: dict[str, Path], tmp_path: Path
) -> None:
    reverted = [everything(templates["apply"]), everything(templates["reverted"])]
    unfinished = copied(templates[name], tmp_path / "unfinished")
    point = 0
    while of_the_package(unfinished) in map(of_the_package, templates.values()):
        point += 1
        killed_at(BOTH[name], copied(templates[name], unfinished), point)
    for second in range(MOST):
        root = copied(unfinished, tmp_path / "tree")
        killed = killed_at(revert, root, second)
        revert(root)
        assert everything(root) in reverted, f"killed at {second}"
        if not killed:
            break
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


def check(message: str, root: Path, name: str, templates: dict[str, Path]) -> str:
    """Check that the message is true and the next runs repair the tree; return the outcome."""
    found, old, new = of_the_package(root), of_the_package(templates["apply"]), of_the_package(templates["revert"])
    before, after = (old, new) if name == "apply" else (new, old)
    assert "\n" not in message
    if "is unfinished" in message:
        outcome = "unfinished"
        assert everything(root) != everything(templates[name])
        again, _ = failed_at(apply, root, 0, errno.EIO, lasting=True, counts=lambda event, arguments: True)
        assert f"an earlier change of {CORE} is unfinished, and this run changed nothing more" in again
        assert of_the_package(root) == found
    elif not message or "was changed as asked" in message:
        outcome = "all"
        assert found == after
    else:
        outcome = "nothing"
        assert f"nothing of {CORE} was changed" in message
        assert found == before
    revert(root)
    assert everything(root) in [everything(templates["apply"]), everything(templates["reverted"])], message
    return outcome


def needs_space(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a call needs disk space: writes and new names do, except for renames that undo."""
    if event == "os.fsync":
        return os.path.isfile(arguments[0])
    making = ("open", "os.mkdir", "os.link", "os.symlink")
    return event in making or (event == "os.rename" and not str(arguments[0]).endswith(KEPT))


@pytest.mark.parametrize("name", BOTH)
def test_a_disk_that_stays_full_changes_all_or_nothing(name: str, templates: dict[str, Path], tmp_path: Path) -> None:
    outcomes = []
    for point in range(MOST):
        root = copied(templates[name], tmp_path / "tree")
        message, reached = failed_at(BOTH[name], root, point, errno.ENOSPC, lasting=True, counts=needs_space)
        assert ("No space left on device" in message) == reached
        outcomes.append(check(message, root, name, templates))
        if not reached:
            break
    assert len(outcomes) > 15
    assert outcomes == ["nothing"] * (len(outcomes) - 1) + ["all"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "lasting", "step"),
    [(errno.EIO, False, 1), (errno.EIO, True, 1), (errno.EROFS, True, SOME)],
    ids=["EIO once", "EIO from then on", "EROFS from then on"],
)
@pytest.mark.parametrize("name", BOTH)
def test_an_error_at_any_call_is_one_line_that_says_what_was_changed(
    name: str, number: int, lasting: bool, step: int, templates: dict[str, Path], tmp_path: Path
) -> None:
    """Every error but a failed removal of an empty folder is such a line; the next run removes the folder."""
    outcomes = []
    for point in range(0, MOST, step):
        root = copied(templates[name], tmp_path / "tree")
        message, reached = failed_at(
            BOTH[name], root, point, number, lasting=lasting, counts=lambda event, arguments: event != "os.rmdir"
        )
        assert (os.strerror(number) in message) == reached
        outcomes.append(check(message, root, name, templates))
        if not reached:
            break
    assert not reached
    assert len(outcomes) * step > 45
    in_order = [outcome for outcome, _ in itertools.groupby(outcomes)]
    assert in_order == (["nothing", "unfinished", "all"] if lasting else ["nothing", "all"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 2 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=400", "none", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(f"needs mount: {error}")
    if done.returncode:
        pytest.skip(f"needs the right to mount a file system: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def fill_blocks(place: Path, free: int) -> None:
    with open(place / "filler", "wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass
        file.truncate(file.tell() - 4096 * free)


def fill_names(place: Path, free: int) -> None:
    (place / "filler").mkdir()
    for index in range(os.statvfs(place).f_ffree - free):
        (place / "filler" / str(index)).touch()


@pytest.mark.parametrize("fill", [fill_blocks, fill_names])
@pytest.mark.parametrize("name", BOTH)
def test_a_file_system_that_is_really_full(
    name: str, fill: Callable[[Path, int], None], templates: dict[str, Path], small_disk: Path
) -> None:
    """Everything or nothing changes with 0, 1, … free blocks or inodes."""
    outcomes = []
    for free in range(60):
        root = copied(templates[name], small_disk / "tree")
        fill(small_disk, free)
        message = attempt(BOTH[name], root)
        assert not message or "No space left on device" in message
        remove(small_disk / "filler")
        outcomes.append(check(message, root, name, templates))
        if not message:
            break
    assert len(outcomes) > 3
    assert outcomes == ["nothing"] * (len(outcomes) - 1) + ["all"]


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_an_error_leaves_links_of_both_kinds_as_they_were(
    links: bool, templates: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, cache = copied(templates["apply"], tmp_path / "tree"), tmp_path / "cache"
    cache.mkdir()
    other = next(root.glob("megatron/core/dist_checkpointing/exchange_utils.py"))
    os.link(other, cache / "other.py")
    (root / ZARR).rename(cache / "zarr.py")
    (root / ZARR).symlink_to(cache / "zarr.py")
    before = everything(root), everything(cache)
    replace = os.replace

    def failing(source: Path, target: Path) -> None:
        if Path(target).name == "state.json":
            raise OSError(errno.EIO, "Input/output error", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    assert f"Input/output error; nothing of {CORE} was changed" in attempt(apply, root)
    assert (everything(root), everything(cache)) == before
    assert other.samefile(cache / "other.py") == links


def test_an_interrupt_from_the_keyboard_changes_nothing(
    templates: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = copied(templates["apply"], tmp_path / "tree")
    replace = os.replace

    def interrupted(source: Path, target: Path) -> None:
        if target == root / ZARR and not str(source).endswith(KEPT):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        apply(root)
    assert everything(root) == everything(templates["apply"])


def test_a_rename_that_fails_though_it_was_made_is_no_failure(
    templates: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename counts as done if the disk has it; NFS reports failure if the reply was lost."""
    root = copied(templates["apply"], tmp_path / "tree")
    replace = os.replace

    def lost(source: Path, target: Path) -> None:
        replace(source, target)
        if Path(target).name == "state.json":
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(source))

    monkeypatch.setattr(os, "replace", lost)
    apply(root)
    assert everything(root) == everything(templates["revert"])


# The order of writes on the disk


@pytest.mark.parametrize("name", BOTH)
def test_the_disk_has_what_a_step_stands_on_before_the_step(
    name: str, templates: dict[str, Path], tmp_path: Path
) -> None:
    """What a step depends on is synced before it; a power loss keeps only synced data."""
    root = copied(templates[name], tmp_path / "tree")
    events = watched(BOTH[name], root)
    folder = installed.state_folder(root, CORE)
    points = [index for index, event in enumerate(events) if decides(event, str(folder / "state.json"))]
    assert len(points) == 1
    switches = [index for index, event in enumerate(events) if is_switch(event)]
    finished = [index for index, event in enumerate(events) if event[:2] == ["os.remove", str(folder / "journal.json")]]
    assert len(switches) > 5
    assert switches[-1] == points[0] < finished[0]
    for index in (switches[0], points[0], finished[0], len(events)):
        assert not waited_for(events[:index])


def watched(change: Callable[[Path], object], root: Path) -> list[list[str]]:
    """Every file-system change and fsync, with the paths."""

    def run() -> list[list[str]]:
        events: list[list[str]] = []
        events_of(lambda event, arguments: events.append([event, *(str(part) for part in arguments[:2])]))
        change(root)
        return [event for event in events if not any(tree_lock.NAME in part for part in event[1:])]

    found: list[list[str]] = in_child(run)[1]
    return found


def test_a_folder_that_a_killed_run_made_is_waited_for(templates: dict[str, Path], tmp_path: Path) -> None:
    """The folder is synced, since the killed run may not have done so."""
    root = copied(templates["apply"], tmp_path / "tree")
    installed.state_folder(root, CORE).mkdir(parents=True)
    events = watched(apply, root)
    for folder in (root, root / installed.STATE_FOLDER):
        assert ["os.fsync", str(folder)] in events[: next(i for i, event in enumerate(events) if is_switch(event))]


def decides(event: list[str], state: str) -> bool:
    return is_switch(event) and state in event


def is_switch(event: list[str]) -> bool:
    """Whether a file gets its new text, or is removed."""
    if event[0] == "os.rename":
        source, target = (Path(path) for path in event[1:])
        of_a_change = re.fullmatch(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.ckpt-patches", source.name)
        return of_a_change is not None and target.name != transaction.JOURNAL
    name = Path(event[1]).name
    return event[0] == "os.remove" and "ckpt-patches" not in name and name != transaction.JOURNAL


def waited_for(events: list[list[str]]) -> set[str]:
    """The files and folders whose text or names the disk may lack after these events."""
    missing: set[str] = set()
    for event, path, *more in events:
        folder = os.path.dirname(more[0] if event in ("os.rename", "os.link") else path)
        if event == "os.fsync":
            missing.discard(path)
        elif event == "open":
            missing |= {path, folder}
        elif event in ("os.rename", "os.link", "os.mkdir", "os.symlink", "os.remove"):
            missing.add(folder)
            assert event != "os.rename" or path not in missing, f"{path} gets another name before the disk has it"
    return missing


# Invalid journals


JOURNALS = {
    "no JSON": "{",
    "a later version": '{"version": 4}',
    "no entries": '{"version": 2, "entries": []}',
    "a path out of the tree": '{"version": 2, "entries": [{"path": "../other", "before": null, "after": "DIGEST"}]}',
    "an absolute path": '{"version": 2, "entries": [{"path": "OTHER", "before": null, "after": "DIGEST"}]}',
    "an absolute path of the version before": '[{"path": "OTHER", "before": null, "after": "DIGEST"}]',
}


@pytest.mark.parametrize("text", JOURNALS.values(), ids=JOURNALS)
def test_a_journal_that_cannot_be_followed_is_refused(text: str, templates: dict[str, Path], tmp_path: Path) -> None:
    root, other = copied(templates["apply"], tmp_path / "tree"), tmp_path / "other"
    other.write_text("of somebody else")
    folder = installed.state_folder(root, CORE)
    folder.mkdir(parents=True)
    digest = hashlib.sha256(other.read_bytes()).hexdigest()
    decisive = f', {{"path": "{folder}/state.json", "before": null, "after": "1"}}]'.replace(
        f"{root}/", "" if text[0] == "{" else f"{root}/"
    )
    text = text.replace("OTHER", str(other)).replace("DIGEST", digest).replace("}]", "}" + decisive)
    (folder / transaction.JOURNAL).write_text(text)
    before = everything(root)
    for change in (apply, revert):
        with pytest.raises(
            UserError, match=r"expected a journal .* in .*journal\.json, found .*Reinstall megatron-core"
        ):
            change(root)
    assert everything(root) == before
    assert other.read_text() == "of somebody else"
