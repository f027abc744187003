"""Write fixes into the files of a tree, and take them out again byte for byte.

`<tree>/.ckpt-patches/<package>/` keeps the original files and `state.json` (which fixes are in, and every edited
file's digest). The text of a file is always made anew from its original and the set of fixes, so fixes can come and
go one by one. The rows of an installed package's RECORD follow, and name our files too: an upgrade or uninstall of
the package takes them along.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_patches import record
from ckpt_patches.errors import UserError
from ckpt_patches.plan import Outcome, TreePlan, fixes_for, module_path, plan_tree
from ckpt_patches.registry import FIXES
from ckpt_patches.transaction import Change, commit, recover

STATE_FOLDER = ".ckpt-patches"
STATE_VERSION = 1


@dataclass(frozen=True)
class AppliedFile:
    """An edited file, as `state.json` keeps it."""

    path: str  # relative to the tree
    original: str  # SHA-256 of the original
    patched: str  # SHA-256 of the edited file
    record_row: str | None  # the original's row in RECORD


@dataclass(frozen=True)
class State:
    """What is applied in place to one package in one tree."""

    fixes: tuple[str, ...] = ()
    files: tuple[AppliedFile, ...] = ()


def state_folder(root: str | Path, package: str) -> Path:
    """Where the originals and the state of a package in a tree are kept."""
    return Path(root, STATE_FOLDER, package)


def read_state(root: str | Path, package: str) -> State:
    """What is applied in place.

    Raises:
        UserError: the state file is damaged or from a newer version.
    """
    path = state_folder(root, package) / "state.json"
    try:
        data = json.loads(path.read_bytes())
        if data["version"] != STATE_VERSION:
            raise ValueError(f"version {data['version']}")
        return State(tuple(data["fixes"]), tuple(AppliedFile(**file) for file in data["files"]))
    except FileNotFoundError:
        return State()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"expected version {STATE_VERSION} of our state in {path}, found {error!r}") from error


def apply(root: str, package: str, names: Sequence[str]) -> TreePlan:
    """Write these fixes into a tree; those that are in already stay. The plan says what each does.

    Raises:
        UserError: a file that changed since, is unreadable, or cannot be written. Nothing is changed then.
    """
    with _locked(root, package):
        state = read_state(root, package)
        originals = _originals(root, package, state)
        wanted = [name for name in fixes_for(package) if name in state.fixes or name in names]
        plan = plan_tree(root, package, wanted, originals)
        unreadable = [result.reason for result in plan.results if result.unreadable]
        if unreadable:
            raise UserError(f"{unreadable[0]}; nothing was changed")
        _write(root, package, state, originals, plan)
        return plan


def revert(root: str, package: str, names: Sequence[str]) -> list[str]:
    """Take these fixes out of a tree again; the names of those that were in.

    Raises:
        UserError: a file that changed since, or cannot be written. Nothing is changed then.
    """
    with _locked(root, package):
        state = read_state(root, package)
        removed = [name for name in state.fixes if name in names]
        if removed:
            originals = _originals(root, package, state)
            remaining = [name for name in state.fixes if name not in names]
            _write(root, package, state, originals, plan_tree(root, package, remaining, originals))
        return removed


def _write(root: str, package: str, state: State, originals: Mapping[str, bytes], plan: TreePlan) -> None:
    """Bring the tree from `state` to the plan's texts, everything or nothing."""
    folder = state_folder(root, package)
    planned = {file.path: file for file in plan.files.values()}
    changes, kept, rows = [], [], {}
    record_file = record.record_path(Path(root), package)
    old_rows = record.rows(record_file.read_bytes()) if record_file else {}
    original_rows = {file.path: file.record_row for file in state.files}
    for path in sorted(planned.keys() | originals.keys()):
        relative = Path(os.path.relpath(path, root)).as_posix()
        backup = folder / "originals" / relative
        original = originals[path] if path in originals else planned[path].original
        after = planned[path].patched if path in planned else original
        row = original_rows.get(relative, old_rows.get(relative))
        backup_after = original if path in planned else None
        changes.append(Change(backup, original if path in originals else None, backup_after))
        changes.append(Change(Path(path), Path(path).read_bytes(), after))
        rows[_relative(root, backup)] = _untracked_row(root, backup) if path in planned else None
        if row is not None:
            rows[relative] = record.row(relative, after) if path in planned else row
        if path in planned:
            kept.append(AppliedFile(relative, _digest(original), _digest(after), row))
    fixes = tuple(plan.named(Outcome.APPLIES))
    if fixes == state.fixes and tuple(kept) == state.files:
        return
    ignore_file, state_file = folder / ".gitignore", folder / "state.json"
    for own in (ignore_file, state_file):
        rows[_relative(root, own)] = _untracked_row(root, own) if kept else None
    # In a checkout no commit takes our folder along.
    ignore_before = ignore_file.read_bytes() if ignore_file.exists() else None
    changes.append(Change(ignore_file, ignore_before, b"*\n" if kept else None))
    if record_file:
        before = record_file.read_bytes()
        changes.append(Change(record_file, before, record.with_rows(before, rows)))
    state_before = state_file.read_bytes() if state_file.exists() else None
    changes.append(Change(state_file, state_before, _state_bytes(State(fixes, tuple(kept))) if kept else None))
    try:
        commit(folder, changes)
    except OSError as error:
        recover(folder)
        raise UserError(
            f"{error.filename or root}: it cannot be written: {error.strerror}; nothing was changed"
        ) from error
    for path in planned.keys() | originals.keys():
        _drop_bytecode(Path(path))


def _originals(root: str, package: str, state: State) -> dict[str, bytes]:
    """The original text of every edited file, by path; checks that nobody touched the files since."""
    originals = {}
    for file in state.files:
        path = Path(root, file.path)
        found = path.read_bytes() if path.exists() else b""
        if _digest(found) != file.patched:
            raise UserError(
                f"{path} changed since the fixes were applied; nothing was changed. Put the applied version back, "
                f"or, to keep the file as it is, delete {state_folder(root, package)}"
            )
        originals[str(path)] = (state_folder(root, package) / "originals" / file.path).read_bytes()
    return originals


@contextlib.contextmanager
def _locked(root: str, package: str) -> Iterator[None]:
    """One writer at a time in a tree, by a lock on its folder (nothing to leave behind); ends an interrupted change."""
    folder = state_folder(root, package)
    modules = [module for name in fixes_for(package) for module in FIXES[name]]
    paths = [Path(module_path(root, module)) for module in modules]
    for place in [Path(root), *[path.parent for path in paths if path.exists()]]:
        if not os.access(place, os.W_OK):
            raise UserError(f"{place}: no permission to write there; nothing was changed")
    descriptor = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(
                f"{root}: its file system cannot lock a folder ({error.strerror}); copy the tree"
            ) from error
        recover(folder)
        yield
    finally:
        _remove_empty_folders(Path(root, STATE_FOLDER))
        os.close(descriptor)


def _remove_empty_folders(top: Path) -> None:
    for folder, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(folder)


def _drop_bytecode(path: Path) -> None:
    """A cached .pyc with an unchecked hash would be run in place of the new text."""
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        with contextlib.suppress(OSError):
            cached.unlink()


def _untracked_row(root: str, path: Path) -> str:
    """A RECORD row without a digest, as pip gives bytecode."""
    return f"{_relative(root, path)},,"


def _relative(root: str, path: Path) -> str:
    return path.relative_to(root).as_posix()


def _state_bytes(state: State) -> bytes:
    files = [vars(file) for file in state.files]
    return json.dumps({"version": STATE_VERSION, "fixes": state.fixes, "files": files}, indent=1).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
