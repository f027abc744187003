"""Write fixes into the files of a tree, and remove them again byte for byte.

`<tree>/.ckpt-patches/<package>/` holds the original files and `state.json`: the applied fixes, and the digests of every
edited file and of its original. Both digests are checked before use. A file's text is always built from its original
and the set of fixes, so fixes can be added and removed one by one. The RECORD of an installed package is updated and
lists our files too: an upgrade or uninstall of the package removes them.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_patches.engine.installed import DISTRIBUTIONS, STATE_FOLDER, state_folder
from ckpt_patches.engine.plan import Outcome, TreePlan, fixes_for, module_path, plan_tree
from ckpt_patches.engine.registry import FIXES
from ckpt_patches.errors import UserError
from ckpt_patches.inplace import tree_lock, wheel_record
from ckpt_patches.inplace.transaction import Change, Failed, Standing, commit, in_tree, is_interrupted, recover

STATE_VERSION = 1


@dataclass(frozen=True)
class AppliedFile:
    """An edited file, as recorded in `state.json`."""

    path: str  # relative to the tree
    original: str  # SHA-256 of the original
    patched: str  # SHA-256 of the edited file
    record_row: str | None  # the original's row in RECORD
    link: str | None = None  # if the original was a symbolic link: its target


@dataclass(frozen=True)
class State:
    """The fixes applied in place to one package in one tree."""

    fixes: tuple[str, ...] = ()
    files: tuple[AppliedFile, ...] = ()
    functions: dict[str, dict[str, list[str]]] = field(
        default_factory=dict
    )  # by module and function: the fixes that edit it


def read_state(root: str | Path, package: str) -> State:
    """The fixes applied in place.

    Raises:
        UserError: the state file is damaged or from a newer version.
    """
    path = state_folder(root, package) / "state.json"
    try:
        data = json.loads(path.read_bytes())
        if data["version"] != STATE_VERSION:
            raise ValueError(f"version {data['version']}")
        files = [AppliedFile(**file) for file in data["files"]]
        for file in files:
            in_tree(file.path)
        return State(tuple(data["fixes"]), tuple(files), data.get("functions", {}))
    except FileNotFoundError:
        return State()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"expected version {STATE_VERSION} of our state in {path}, found {error!r}; {_nothing(package)}. "
            f"{_begin_anew(root, package)}"
        ) from error


def apply(root: str, package: str, names: Sequence[str]) -> TreePlan:
    """Write these fixes into a tree; applied ones stay. Returns the plan, with the outcome of each fix.

    Raises:
        UserError: a file or an original has changed since, is unreadable, or cannot be written; an earlier change was
            interrupted, and still cannot be completed; or a process of another host holds the lock. The message states
            whether files were changed: none, unless a disk error prevents the rollback.
    """
    with _locked(root, package):
        state = _known_state(root, package)
        originals = _originals(root, package, state)
        wanted = [name for name in fixes_for(package) if name in state.fixes or name in names]
        plan = plan_tree(root, package, wanted, originals)
        unreadable = [result.reason for result in plan.results if result.unreadable]
        if unreadable:
            raise UserError(f"{unreadable[0]}; {_nothing(package)}")
        _check_kept(state, plan)
        _write(root, package, state, originals, plan)
        return plan


def revert(root: str, package: str, names: Sequence[str]) -> list[str]:
    """Remove these fixes from a tree; return the names of those that were applied.

    Raises:
        UserError: as `apply`.
    """
    if not Path(root, STATE_FOLDER).exists():
        return []
    with _locked(root, package, writes=state_folder(root, package).exists()):
        state = _known_state(root, package)
        removed = [name for name in state.fixes if name in names]
        if removed:
            originals = _originals(root, package, state)
            remaining = [name for name in state.fixes if name not in names]
            plan = plan_tree(root, package, remaining, originals)
            _check_kept(state, plan)
            _write(root, package, state, originals, plan)
        return removed


def _known_state(root: str, package: str) -> State:
    """The applied state. Refuses fixes that are unknown here, which a change would remove silently."""
    state = read_state(root, package)
    unknown = [name for name in state.fixes if name not in fixes_for(package)]
    if unknown:
        raise UserError(
            f"{state_folder(root, package)}: it has {', '.join(unknown)}, which this version does not know; "
            f"{_nothing(package)}. Revert with the version of training-checkpoint-patches that applied it"
        )
    return state


def _check_kept(state: State, plan: TreePlan) -> None:
    """Check that no applied fix would be lost because it no longer fits (in this version, or with other fixes).

    Raises:
        UserError: one would be lost; the message names it.
    """
    for result in plan.results:
        if result.name in state.fixes and result.outcome is not Outcome.APPLIES:
            raise UserError(
                f"{result.name} is applied in place, and would be lost: {result.reason or result.outcome.value}; "
                f"{_nothing(plan.package)}. Revert it first"
            )


def _nothing(package: str) -> str:
    return f"nothing of {package} was changed"


def _begin_anew(root: str | Path, package: str) -> str:
    """What to do if our own files cannot be trusted."""
    return f"Reinstall {DISTRIBUTIONS[package]}, or restore it in a checkout, and delete {state_folder(root, package)}"


@dataclass(frozen=True)
class _Rewrite:
    """The change of one upstream file's text."""

    relative: str  # its path in the tree
    original: bytes
    before: bytes
    after: bytes  # the original if no fix is left
    was_edited: bool
    is_edited: bool
    row: str | None  # of the original, in RECORD
    link: str | None  # the target, if the original was a symbolic link


def _write(root: str, package: str, state: State, originals: Mapping[str, bytes], plan: TreePlan) -> None:
    """Change the tree from `state` to the plan's texts, atomically."""
    record_file = wheel_record.record_path(Path(root), package)
    rewrites = _rewrites(root, state, originals, plan, record_file)
    new_state = _state_after(rewrites, plan)
    if new_state == state:
        return
    folder = state_folder(root, package)
    try:
        commit(Path(root), folder, _changes(Path(root), folder, rewrites, new_state, record_file))
    except Failed as failed:
        raise UserError(_failure(failed, root, package)) from failed


def _failure(failed: Failed, root: str, package: str) -> str:
    what = {
        Standing.NOTHING: _nothing(package),
        Standing.ALL: f"{package} was changed as asked",
        Standing.UNFINISHED: f"the change of {package} is unfinished: do not use it before the next apply or revert "
        "gets through, which undoes this one first",
    }[failed.standing]
    left = "" if failed.tidy or failed.standing is Standing.UNFINISHED else "; the next apply or revert tidies up"
    return f"{_said(failed.error, root)}; {what}{left}"


def _said(error: OSError, root: str) -> str:
    return f"{error.filename or root}: it cannot be read or written: {error.strerror or error}"


def _rewrites(
    root: str, state: State, originals: Mapping[str, bytes], plan: TreePlan, record_file: Path | None
) -> list[_Rewrite]:
    """The changes of all files that are edited now, or will be."""
    planned = {file.path: file for file in plan.files.values()}
    rows = wheel_record.rows(record_file.read_bytes()) if record_file else {}
    rows.update({file.path: file.record_row for file in state.files if file.record_row is not None})
    links = {file.path: file.link for file in state.files}
    rewrites = []
    for path in sorted(planned.keys() | originals.keys()):
        relative = Path(os.path.relpath(path, root)).as_posix()
        original = originals[path] if path in originals else planned[path].original
        after = planned[path].patched if path in planned else original
        row, before = rows.get(relative), Path(path).read_bytes()
        link = links[relative] if relative in links else _link(Path(path))
        rewrites.append(_Rewrite(relative, original, before, after, path in originals, path in planned, row, link))
    return rewrites


def _link(path: Path) -> str | None:
    return os.readlink(path) if path.is_symlink() else None


def _state_after(rewrites: Sequence[_Rewrite], plan: TreePlan) -> State:
    files = [
        AppliedFile(r.relative, _sha256(r.original), _sha256(r.after), r.row, r.link) for r in rewrites if r.is_edited
    ]
    functions = {
        module: {name: list(fixes) for name, fixes in file.functions.items()} for module, file in plan.files.items()
    }
    return State(tuple(plan.named(Outcome.APPLIES)), tuple(files), functions)


def _changes(
    root: Path, folder: Path, rewrites: Sequence[_Rewrite], state: State, record_file: Path | None
) -> list[Change]:
    """All files that change together. The state file is last: it commits the change."""
    changes = []
    for rewrite in rewrites:
        path, backup = root / rewrite.relative, _backup(folder, rewrite.relative)
        kept_before = rewrite.original if rewrite.was_edited else None
        kept_after = rewrite.original if rewrite.is_edited else None
        changes.append(Change(backup, kept_before, kept_after, like=path))
        changes += [Change(cached, cached.read_bytes(), None) for cached in _bytecode(path)]
        changes.append(Change(path, rewrite.before, rewrite.after, link=_link_again(path, rewrite)))
    # In a checkout, Git ignores our folder.
    changes.append(_own_file(folder / ".gitignore", b"*\n" if state.files else None))
    if record_file:
        text = record_file.read_bytes()
        changes.append(Change(record_file, text, wheel_record.with_rows(text, _rows(root, folder, rewrites, state))))
    changes.append(_own_file(folder / "state.json", _state_bytes(state) if state.files else None))
    return changes


def _link_again(path: Path, rewrite: _Rewrite) -> str | None:
    """The target of the original's symbolic link, if it still has the original text."""
    if rewrite.link is None or rewrite.is_edited:
        return None
    return rewrite.link if _read(path.parent / rewrite.link) == rewrite.original else None


def _bytecode(path: Path) -> list[Path]:
    """A module's cached bytecode, to be removed. With an unchecked hash, it would run instead of the new text."""
    cached = (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")
    return [file for file in cached if _is_unchecked(file) or os.access(file.parent, os.W_OK)]


def _is_unchecked(cached: Path) -> bool:
    """Whether bytecode has an unchecked hash, by the flags of https://peps.python.org/pep-0552/."""
    return cached.read_bytes()[4:5] == b"\x01"


def _own_file(path: Path, after: bytes | None) -> Change:
    return Change(path, _read(path), after)


def _rows(root: Path, folder: Path, rewrites: Sequence[_Rewrite], state: State) -> dict[str, str | None]:
    """The rows of RECORD that change. Our own files have no digest, like bytecode in pip's rows."""
    rows: dict[str, str | None] = {}
    own = {folder / name: bool(state.files) for name in (".gitignore", "state.json")}
    own.update({_backup(folder, rewrite.relative): rewrite.is_edited for rewrite in rewrites})
    for path, stays in own.items():
        relative = path.relative_to(root).as_posix()
        rows[relative] = f"{relative},," if stays else None
    for rewrite in rewrites:
        if rewrite.row is not None:
            rows[rewrite.relative] = (
                wheel_record.row(rewrite.relative, rewrite.after) if rewrite.is_edited else rewrite.row
            )
    return rows


def _backup(folder: Path, relative: str) -> Path:
    """The path of an edited file's original."""
    return folder / "originals" / relative


def _originals(root: str, package: str, state: State) -> dict[str, bytes]:
    """The original text of every edited file, by path; refuses files and originals that have changed since."""
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
def _locked(root: str, package: str, *, writes: bool = True) -> Iterator[None]:
    """Lock a tree for one writer, and complete or undo an interrupted change. Leaves no files behind.

    A file system error inside the block is a read error: nothing was changed yet.
    """
    if writes:
        check_rights(root, package)
    folder = Path(root, STATE_FOLDER)
    try:
        with tree_lock.held(Path(root), folder):
            _end_interrupted(root, package)
            yield
    except tree_lock.NotReleasedError as failed:
        raise UserError(f"{_said(failed.error, root)}; {package} was changed as asked") from failed
    except OSError as error:
        if is_interrupted(state_folder(root, package)):
            raise _still_unfinished(error, root, package) from error
        raise UserError(f"{_said(error, root)}; {_nothing(package)}") from error
    finally:
        _remove_empty_folders(folder)


def check_rights(root: str, package: str) -> None:
    """Raise UserError unless the files of a package may be replaced."""
    modules = [module for name in fixes_for(package) for module in FIXES[name]]
    paths = [Path(module_path(root, module)) for module in modules]
    for place in [Path(root), *[path.parent for path in paths if path.exists()]]:
        if not os.access(place, os.W_OK):
            raise UserError(f"{place}: no permission to write there; {_nothing(package)}")


def _end_interrupted(root: str, package: str) -> None:
    """Undo or complete a killed run's change, and remove its empty folders: only newly made folders are synced."""
    folder = state_folder(root, package)
    interrupted = is_interrupted(folder)
    try:
        recover(Path(root), folder)
    except OSError as error:
        if not interrupted:
            raise
        raise _still_unfinished(error, root, package) from error
    except UserError as error:
        raise UserError(f"{error}. {_begin_anew(root, package)}") from error
    _remove_empty_folders(Path(root, STATE_FOLDER))


def _still_unfinished(error: OSError, root: str, package: str) -> UserError:
    return UserError(
        f"{_said(error, root)}; an earlier change of {package} is unfinished, and this run changed nothing more. "
        f"Run it again when the cause is gone, or: {_begin_anew(root, package)}"
    )


def _remove_empty_folders(top: Path) -> None:
    for folder, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(folder)


def _state_bytes(state: State) -> bytes:
    kept = {"fixes": state.fixes, "files": [vars(file) for file in state.files], "functions": state.functions}
    return json.dumps({"version": STATE_VERSION, **kept}, indent=1).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
