"""Write fixes into the files of a tree, and remove them again byte for byte.

`<tree>/.ckpt-patches/<package>/` holds the originals of the edited files, and `state.json`. A file's text is always
built from its original and the set of fixes. From before the first rename until after the last one, the state has every
fix and the digest of every text that the tree may have: the next change completes what a kill or an error has left.
"""

import base64
import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ckpt_patches import __version__
from ckpt_patches.engine.installed import DISTRIBUTIONS, STATE_FOLDER, state_folder
from ckpt_patches.engine.plan import Outcome, TreePlan, fixes_for, plan_tree
from ckpt_patches.errors import UserError, one_line
from ckpt_patches.runtime.durable import make_folder, sync_folder, write_durably
from ckpt_patches.runtime.shown import shown

STATE_VERSION = 2  # 1, of version 0.2, has the same keys
STATE, ORIGINALS, IGNORE, NOTE = "state.json", "originals", ".gitignore", "README.txt"
TEMPORARY = ".ckpt-patches"  # ends the names of temporary files
NOTE_TEXT = """training-checkpoint-patches {0} has edited files of {1} here. Its uninstall leaves them edited.
`ckpt-patches revert` restores them. Without it, reinstall {1}, or restore it in a checkout, and delete this folder.
"""


@dataclass(frozen=True)
class AppliedFile:
    """An edited file, as recorded in `state.json`."""

    original: str  # SHA-256 of the original
    patched: str  # SHA-256 of the edited file
    record_row: str | None = None  # the original's row in RECORD
    link: str | None = None  # if the original was a symbolic link: its target
    before: str | None = None  # during a change: SHA-256 of the text before it


@dataclass(frozen=True)
class State:
    """The fixes applied in place to one package in one tree."""

    fixes: tuple[str, ...] = ()
    files: Mapping[str, AppliedFile] = field(default_factory=dict)  # by path in the tree
    functions: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)  # by module and function: fixes


def read_state(root: str | Path, package: str) -> State:
    """The fixes applied in place. Raises UserError if the state is damaged, or of a version that is unknown here."""
    folder = state_folder(root, package)
    try:
        if (folder / "journal.json").exists():
            raise ValueError("an interrupted change of version 0.2, whose apply or revert completes it")
        if not (folder / STATE).exists() and not any((folder / ORIGINALS).rglob("*.py")):
            return State()
        data = json.loads((folder / STATE).read_bytes())
        if data["version"] not in (1, STATE_VERSION):
            raise ValueError(f"version {shown(data['version'])}")
        for file in data["files"]:  # which may come from someone else, with the tree
            is_inside = os.path.normpath(file["path"]) == file["path"] and not file["path"].startswith(("/", ".."))
            if not is_inside or not all(isinstance(text, str | None) for text in file.values()):
                raise ValueError(f"{shown(file)} where a file in the tree should be")
        files = {file.pop("path"): AppliedFile(**file) for file in data["files"]}
        return State(tuple(map(str, data["fixes"])), files, data.get("functions", {}))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"expected our state in {folder / STATE}, found {shown(error)}. {_anew(root, package)}"
        ) from error


def in_place(root: str | Path, package: str) -> State:
    """What the files have; nothing if one of them was changed since. Raises UserError as `read_state`."""
    state = read_state(root, package)
    have = all(_digest(_text(Path(root, path))) == file.patched for path, file in state.files.items())
    return state if have else State()


def apply(root: str, package: str, names: Collection[str]) -> TreePlan:
    """Write these fixes into a tree; applied ones stay. Returns the plan. Raises UserError, as `revert`."""
    return _change(root, package, add=names)[1]


def revert(root: str, package: str, names: Collection[str]) -> list[str]:
    """Remove these fixes; return those that were applied. Raises UserError for changed files and errors of the disk."""
    state, _ = _change(root, package, remove=names)
    return [name for name in state.fixes if name in names]


def _change(root: str, package: str, add: Collection[str] = (), remove: Collection[str] = ()) -> tuple[State, TreePlan]:
    """Add and remove fixes; return the state before, and the plan."""
    standing, attempts = f"nothing of {package} was changed", 5
    while True:
        try:
            with _locked(root):
                state = read_state(root, package)
                originals = _originals(root, package, state)
                wanted = [name for name in fixes_for(package) if name in {*state.fixes, *add}.difference(remove)]
                plan = plan_tree(root, package, wanted, originals)
                plan.check_readable()
                if lost := set(state.fixes).difference(remove, plan.named(Outcome.APPLIES)):
                    why = "without a match here, or unknown to this version: revert it with the one that applied it"
                    raise UserError(f"{shown(sorted(lost))} is applied in place and would be lost, as it is {why}")
                standing = f"{package} may be changed in part: the next apply or revert completes it"
                _write(root, state, originals, plan)
                return state, plan
        except (OSError, UserError) as error:
            attempts -= 1
            # Another host, which no lock excludes, may just make the same change, and remove what it does not need.
            if not attempts or not isinstance(error, FileNotFoundError | UserError):
                raise UserError(f"{one_line(error, root)}; {standing}") from error


@contextlib.contextmanager
def _locked(root: str) -> Iterator[None]:
    """Exclude other processes of this host, which wait. Leaves no file behind."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot lock a folder
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _originals(root: str, package: str, state: State) -> dict[str, bytes]:
    """The original of every edited file, by path. Raises UserError if a file or an original has changed since."""
    folder, originals = state_folder(root, package), {}
    for name, file in state.files.items():
        path, backup = os.path.join(root, name), folder / ORIGINALS / name
        text = _text(Path(path))
        if _digest(text) not in (file.original, file.patched, file.before):
            raise UserError(f"{path} changed since the fixes were applied. Put it back, or delete {folder} to keep it")
        originals[path] = text if _digest(text) == file.original else _text(backup)
        if _digest(originals[path]) != file.original:
            raise UserError(f"expected the original of {path} in {backup}, found another text. {_anew(root, package)}")
    return originals


def _write(root: str, state: State, originals: Mapping[str, bytes], plan: TreePlan) -> None:
    """Change the tree from `state` to the texts of the plan."""
    folder, distribution = state_folder(root, plan.package), DISTRIBUTIONS[plan.package]
    records = Path(root).glob(f"{distribution.replace('-', '_')}-*.dist-info/RECORD")
    record = min((path for path in records if not path.is_symlink()), default=None)  # a link is another tool's
    after = _state_after(root, state, plan, record)
    texts: dict[Path, bytes | str | None] = {Path(path): text for path, text in originals.items()}
    texts.update({Path(root, path): file.link for path, file in state.files.items() if file.link})
    texts.update({Path(file.path): file.patched for file in plan.files.values()})
    if record:
        texts[record] = _record_after(root, record, folder, state, after, plan)
    changes = {path: text for path, text in texts.items() if _content(path) != text}
    try:
        if changes or _content(folder / STATE) != _state_text(after):
            if read_state(root, plan.package) != state:
                raise UserError(f"{folder} was changed by another host")
            files = {**state.files, **after.files}
            files = {path: replace(file, before=_digest(_text(Path(root, path)))) for path, file in files.items()}
            between = State(tuple(dict.fromkeys((*state.fixes, *after.fixes))), files, after.functions)
            _put({folder / STATE: _state_text(between)})
            for file in plan.files.values():
                _put({folder / ORIGINALS / os.path.relpath(file.path, root): file.original}, like=Path(file.path))
            note = NOTE_TEXT.format(__version__, distribution)
            _put({folder / IGNORE: b"*\n", folder / NOTE: note.encode()})  # in a checkout, Git ignores our folder
            _put({cached: None for path in changes for cached in _bytecode(path)})
            _put(changes)
            _put({folder / ORIGINALS / path: None for path in state.files if path not in after.files})
            _put({folder / STATE: _state_text(after)})
    finally:
        _tidy(root, plan.package, {path.parent for path in texts})


def _state_after(root: str, state: State, plan: TreePlan, record: Path | None) -> State:
    """The state that belongs to the plan's texts."""
    rows = {row.split(",")[0]: row for row in record.read_text("latin-1").splitlines()} if record else {}
    files = {}
    for file in plan.files.values():
        path, link = os.path.relpath(file.path, root), os.readlink(file.path) if os.path.islink(file.path) else None
        first = AppliedFile(_digest(file.original), "", rows.get(path), link)
        files[path] = replace(state.files.get(path, first), patched=_digest(file.patched), before=None)
    functions = {module: file.functions for module, file in plan.files.items()}
    return State(tuple(plan.named(Outcome.APPLIES)), files, functions)


def _state_text(state: State) -> bytes | None:
    """The text of `state.json`; None if nothing is applied."""
    files = [{"path": path, **asdict(file)} for path, file in state.files.items()]
    data = {"version": STATE_VERSION, "fixes": state.fixes, "files": files, "functions": state.functions}
    return json.dumps(data, indent=1).encode() if files else None


def _record_after(root: str, record: Path, folder: Path, state: State, after: State, plan: TreePlan) -> bytes:
    """RECORD with the rows of edited files, and of ours: an upgrade or uninstall of the package then removes these."""
    # https://packaging.python.org/en/latest/specifications/recording-installed-packages/
    rows = {path: file.record_row for path, file in state.files.items()}
    for file in plan.files.values():
        path, digest = os.path.relpath(file.path, root), hashlib.sha256(file.patched).digest()
        rows[path] = f"{path},sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')},{len(file.patched)}"
    text, own = record.read_bytes().decode("latin-1"), f"{STATE_FOLDER}/{folder.name}/"  # keeps every byte
    end = "\r\n" if "\r\n" in text else "\n"
    lines = [f"{own}{name},,{end}" for name in _own_files(after)]
    for line in text.splitlines(keepends=True):
        path, row = line.split(",")[0], line.rstrip("\r\n")
        if not path.startswith(own):
            lines.append((rows.get(path) or row) + line[len(row) :])
    return "".join(lines).encode("latin-1")


def _own_files(state: State) -> list[str]:
    """The files in our folder that a state needs."""
    return [IGNORE, NOTE, STATE, *(f"{ORIGINALS}/{path}" for path in state.files)] if state.files else []


def _tidy(root: str, package: str, places: Collection[Path]) -> None:
    """Remove temporary files, and what the state does not need of our folder."""
    folder = state_folder(root, package)
    left = {temporary for place in places for temporary in place.glob(f".*{TEMPORARY}")}
    left |= {Path(inner, name) for inner, _, names in os.walk(folder) for name in names}
    for path in left.difference(folder / name for name in _own_files(read_state(root, package))):
        path.unlink(missing_ok=True)
    for inner, _, _ in os.walk(folder.parent, topdown=False):
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(inner)


def _put(texts: Mapping[Path, bytes | str | None], like: Path | None = None) -> None:
    """Give files a text, or links a target, or remove them (None); wait until the disk has it. No rename needs space.

    A file gets the mode and owner of `like`, or of the one before.
    """
    texts = {path: text for path, text in texts.items() if _content(path) != text}
    temporaries = {path: path.with_name(f".{path.name}.{os.urandom(8).hex()}{TEMPORARY}") for path in texts}
    for path, text in texts.items():
        if isinstance(text, str):
            os.symlink(text, temporaries[path])
        elif text is not None:
            make_folder(path.parent)
            write_durably(temporaries[path], text, next(filter(Path.exists, (like or path,)), None))
    for path, text in texts.items():
        if text is None:
            path.unlink(missing_ok=True)
        else:
            os.replace(temporaries[path], path)
    for parent in {path.parent for path in texts}:
        sync_folder(parent)


def _bytecode(path: Path) -> list[Path]:
    """A module's cached bytecode: with an unchecked hash, it would run instead of a new text."""
    cached = (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")
    unchecked = b"\x01"  # the flags of https://peps.python.org/pep-0552/
    return [file for file in cached if os.access(file.parent, os.W_OK) or file.read_bytes()[4:5] == unchecked]


def _content(path: Path) -> bytes | str | None:
    """A file's text, the target of a symbolic link, or None."""
    return os.readlink(path) if path.is_symlink() else _text(path) if path.exists() else None


def _text(path: Path) -> bytes:
    """A file's text; empty if there is no such file."""
    return path.read_bytes() if path.exists() else b""


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _anew(root: str | Path, package: str) -> str:
    """What to do if our own files cannot be trusted."""
    return f"Reinstall {DISTRIBUTIONS[package]}, or restore it in a checkout, and delete {state_folder(root, package)}"
