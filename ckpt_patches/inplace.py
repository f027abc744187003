"""Write fixes into the files of a tree, and take them out again byte for byte.

`<tree>/.ckpt-patches/<package>/` keeps the original files and `state.json` (which fixes are in, and the digests of
every edited file and of its original; both are checked before anything is made of them). The text of a file is always
made anew from its original and the set of fixes, so fixes can come and go one by one. The rows of an installed
package's RECORD follow, and name our files too: an upgrade or uninstall of the package takes them along.
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
from ckpt_patches.upstream import DISTRIBUTIONS

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
        UserError: a file, or its kept original, that changed since, is unreadable, or cannot be written. Nothing is
            changed then.
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
        UserError: a file, or its kept original, that changed since, or cannot be written. Nothing is changed then.
    """
    with _locked(root, package):
        state = read_state(root, package)
        removed = [name for name in state.fixes if name in names]
        if removed:
            originals = _originals(root, package, state)
            remaining = [name for name in state.fixes if name not in names]
            _write(root, package, state, originals, plan_tree(root, package, remaining, originals))
        return removed


def _nothing(package: str) -> str:
    return f"nothing of {package} was changed"


def _begin_anew(root: str | Path, package: str) -> str:
    """What to do where our own files cannot be trusted."""
    return f"Reinstall {DISTRIBUTIONS[package]}, or restore it in a checkout, and delete {state_folder(root, package)}"


@dataclass(frozen=True)
class _Rewrite:
    """One upstream file on its way from the text that it has to the text that it gets."""

    relative: str  # its path in the tree
    original: bytes
    before: bytes
    after: bytes  # the original again where no fix is left
    was_edited: bool
    is_edited: bool
    row: str | None  # the original's, in RECORD


def _write(root: str, package: str, state: State, originals: Mapping[str, bytes], plan: TreePlan) -> None:
    """Bring the tree from `state` to the plan's texts, everything or nothing."""
    record_file = record.record_path(Path(root), package)
    rewrites = _rewrites(root, state, originals, plan, record_file)
    new_state = _state_after(rewrites, plan)
    if new_state == state:
        return
    for rewrite in rewrites:
        _drop_bytecode(Path(root, rewrite.relative))
    folder = state_folder(root, package)
    try:
        commit(folder, _changes(Path(root), folder, rewrites, new_state, record_file))
    except OSError as error:
        recover(folder)
        place = error.filename or root
        raise UserError(f"{place}: it cannot be written: {error.strerror}; nothing was changed") from error


def _rewrites(
    root: str, state: State, originals: Mapping[str, bytes], plan: TreePlan, record_file: Path | None
) -> list[_Rewrite]:
    """Every file that is edited now, or will be."""
    planned = {file.path: file for file in plan.files.values()}
    rows = record.rows(record_file.read_bytes()) if record_file else {}
    rows.update({file.path: file.record_row for file in state.files if file.record_row is not None})
    rewrites = []
    for path in sorted(planned.keys() | originals.keys()):
        relative = Path(os.path.relpath(path, root)).as_posix()
        original = originals[path] if path in originals else planned[path].original
        after = planned[path].patched if path in planned else original
        row = rows.get(relative)
        before = Path(path).read_bytes()
        rewrites.append(_Rewrite(relative, original, before, after, path in originals, path in planned, row))
    return rewrites


def _state_after(rewrites: Sequence[_Rewrite], plan: TreePlan) -> State:
    files = [AppliedFile(r.relative, _sha256(r.original), _sha256(r.after), r.row) for r in rewrites if r.is_edited]
    return State(tuple(plan.named(Outcome.APPLIES)), tuple(files))


def _changes(
    root: Path, folder: Path, rewrites: Sequence[_Rewrite], state: State, record_file: Path | None
) -> list[Change]:
    """All files that change together, the state file last: it decides whether the change took place."""
    changes = []
    for rewrite in rewrites:
        backup = _backup(folder, rewrite.relative)
        kept_before = rewrite.original if rewrite.was_edited else None
        kept_after = rewrite.original if rewrite.is_edited else None
        changes.append(Change(backup, kept_before, kept_after))
        changes.append(Change(root / rewrite.relative, rewrite.before, rewrite.after))
    # In a checkout no commit takes our folder along.
    changes.append(_own_file(folder / ".gitignore", b"*\n" if state.files else None))
    if record_file:
        text = record_file.read_bytes()
        changes.append(Change(record_file, text, record.with_rows(text, _rows(root, folder, rewrites, state))))
    changes.append(_own_file(folder / "state.json", _state_bytes(state) if state.files else None))
    return changes


def _own_file(path: Path, after: bytes | None) -> Change:
    return Change(path, path.read_bytes() if path.exists() else None, after)


def _rows(root: Path, folder: Path, rewrites: Sequence[_Rewrite], state: State) -> dict[str, str | None]:
    """The rows of RECORD that change; our own files without a digest, as pip lists bytecode."""
    rows: dict[str, str | None] = {}
    own = {folder / name: bool(state.files) for name in (".gitignore", "state.json")}
    own.update({_backup(folder, rewrite.relative): rewrite.is_edited for rewrite in rewrites})
    for path, stays in own.items():
        relative = path.relative_to(root).as_posix()
        rows[relative] = f"{relative},," if stays else None
    for rewrite in rewrites:
        if rewrite.row is not None:
            rows[rewrite.relative] = record.row(rewrite.relative, rewrite.after) if rewrite.is_edited else rewrite.row
    return rows


def _backup(folder: Path, relative: str) -> Path:
    """Where an edited file's original is kept."""
    return folder / "originals" / relative


def _originals(root: str, package: str, state: State) -> dict[str, bytes]:
    """The original text of every edited file, by path; checks that nobody touched the files or the originals since."""
    originals = {}
    for file in state.files:
        path, backup = Path(root, file.path), _backup(state_folder(root, package), file.path)
        text, original = _read(path), _read(backup)
        if text is None or _sha256(text) != file.patched:
            raise UserError(
                f"{path} changed since the fixes were applied; {_nothing(package)}. Put the applied version back, "
                f"or, to keep the file as it is, delete {state_folder(root, package)}"
            )
        if original is None or _sha256(original) != file.original:
            found = "no such file" if original is None else f"SHA-256 {_sha256(original)}"
            raise UserError(
                f"expected the original of {path} (SHA-256 {file.original}) in {backup}, found {found}; "
                f"{_nothing(package)}. {_begin_anew(root, package)}"
            )
        originals[str(path)] = original
    return originals


def _read(path: Path) -> bytes | None:
    """A file's text; None if there is no such file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


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


def _state_bytes(state: State) -> bytes:
    files = [vars(file) for file in state.files]
    return json.dumps({"version": STATE_VERSION, "fixes": state.fixes, "files": files}, indent=1).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
