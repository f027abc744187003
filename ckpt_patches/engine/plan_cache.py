"""Plans of trees, kept between processes: else each process of a job parses and compiles the same files again.

A kept plan is used where nothing that it was made from has changed: our own code, the text of every upstream file that
was looked at, the files that were not there, the interpreter. It lies in the user's cache folder and not beside
upstream's files, whose folders would then outlive an uninstall, and still be found by `import`. What lies there is run:
it has to belong to this user, in a folder that nobody else can write to, and be whole.
"""

import contextlib
import hashlib
import importlib.util
import marshal
import os
import re
import stat
import sys
from collections.abc import Sequence
from types import CodeType

from ckpt_patches.engine.plan import FilePlan, FixResult, Outcome, TreePlan, module_path, plan_tree, text_digest
from ckpt_patches.engine.registry import folder as folder_of_fixes
from ckpt_patches.runtime.ranks import is_rank_zero

# More trees than a machine uses; the oldest go.
MOST = 32
# A file's name, and the one that it has until it is whole.
_NAME = re.compile(r"[a-z.]+-[\w-]+-[0-9a-f]{16}\.plan(\.[0-9a-f]{16})?")
_MAGIC = b"ckpt-patches plan 1\n"
_DIGEST = 32  # bytes

_Results = list[tuple[str, str, tuple[str, ...]]]  # name, outcome, modules
_Files = list[tuple[str, bytes, CodeType, tuple[str, ...]]]  # module, edited text, its code, fixes


def plan_or_kept(root: str, package: str, names: Sequence[str]) -> TreePlan:
    """What `plan_tree` returns for these fixes, from an earlier process if nothing has changed since.

    The first process of a group keeps the plan that it has made; as Python does with bytecode, in silence where that
    cannot be, and not where Python is told to write none (`PYTHONDONTWRITEBYTECODE`). Whatever is wrong with a kept
    plan, one is made.
    """
    key, path, plan = b"", "", None
    with contextlib.suppress(Exception):
        path = _path(root, package, names)
        key = _key(root, package, names)
        plan = _read(path, key, root, package) if path and key else None
    if plan is not None:
        return plan
    plan = plan_tree(root, package, names)
    with contextlib.suppress(Exception):
        if path and key and _is_to_be_kept(plan) and _key(root, package, names) == key:
            _keep(plan, path, key)
    return plan


def cache_folder() -> str:
    """`ckpt-patches` in the user's folder for caches; empty if there is no such folder."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(caches, "ckpt-patches") if os.path.isabs(caches) else ""


def _is_to_be_kept(plan: TreePlan) -> bool:
    """What does not match is looked at each time: its reason may be gone."""
    return not plan.named(Outcome.NO_MATCH) and not sys.dont_write_bytecode and is_rank_zero(os.environ)


def _path(root: str, package: str, names: Sequence[str]) -> str:
    """One a tree, choice of fixes and interpreter: whatever else changes, the new plan takes the old one's place."""
    folder = cache_folder()
    what = "\n".join([root, *names, sys.version, str(sys.flags.optimize)])
    digest = hashlib.blake2b(what.encode(errors="surrogateescape"), digest_size=8).hexdigest()
    return os.path.join(folder, f"{package}-{sys.implementation.cache_tag}-{digest}.plan") if folder else ""


def _key(root: str, package: str, names: Sequence[str]) -> bytes:
    """A digest of what a plan is made from besides upstream's files; empty if that is not what runs here.

    An update changes the files of an engine that a process has loaded already.
    """
    if _digest_of_folder(_ENGINE) != _LOADED:
        return b""
    digest = hashlib.blake2b(importlib.util.MAGIC_NUMBER, digest_size=_DIGEST)
    for part in [sys.version, str(sys.flags.optimize), root, package, *names]:
        digest.update(part.encode(errors="surrogateescape") + b"\0")
    digest.update(_LOADED + _digest_of_folder(folder_of_fixes(package)))
    return digest.digest()


def _digest_of_folder(folder: str) -> bytes:
    """Of the names and texts of a folder's modules."""
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for name in sorted(os.listdir(folder)):
        if name.endswith(".py"):
            with open(os.path.join(folder, name), "rb") as file:
                digest.update(os.fsencode(name) + b"\0" + text_digest(file.read()))
    return digest.digest()


_ENGINE = os.path.dirname(os.path.abspath(__file__))
_LOADED = b""
with contextlib.suppress(OSError):
    _LOADED = _digest_of_folder(_ENGINE)


def _read(path: str, key: bytes, root: str, package: str) -> TreePlan | None:
    """The plan in a file; None if there is none, or it is not for the tree as it is."""
    data = _read_own(path)
    start = len(_MAGIC) + _DIGEST
    if data is None or data[:start] != _MAGIC + key or not _is_whole(data[start:]):
        return None
    results, texts, files = marshal.loads(data[start + _DIGEST :])
    originals = _unchanged(root, texts)
    return None if originals is None else _plan(root, package, results, texts, files, originals)


def _plan(
    root: str, package: str, results: _Results, texts: dict[str, bytes], files: _Files, originals: dict[str, bytes]
) -> TreePlan:
    return TreePlan(
        package,
        root,
        tuple(FixResult(name, Outcome(outcome), modules=modules) for name, outcome, modules in results),
        {
            module: FilePlan(module, module_path(root, module), originals[module], patched, code, fixes)
            for module, patched, code, fixes in files
        },
        texts,
    )


def _unchanged(root: str, texts: dict[str, bytes]) -> dict[str, bytes] | None:
    """The texts of the modules that a plan has looked at; None if one of them is not what it was."""
    found = {}
    for module, digest in texts.items():
        path = module_path(root, module)
        try:
            with open(path, "rb") as file:
                found[module] = file.read()
        except FileNotFoundError:
            if digest or os.path.exists(path + "c"):
                return None
            continue
        if text_digest(found[module]) != digest:
            return None
    return found


def _keep(plan: TreePlan, path: str, key: bytes) -> None:
    """Write a plan, whole or not at all."""
    results: _Results = [(result.name, result.outcome.value, result.modules) for result in plan.results]
    files: _Files = [(file.module, file.patched, file.code, file.fixes) for file in plan.files.values()]
    data = marshal.dumps((results, plan.texts, files))
    folder, temporary = os.path.dirname(path), f"{path}.{os.urandom(8).hex()}"
    if not _is_folder_of_ours(folder):
        return
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(_MAGIC + key + hashlib.blake2b(data, digest_size=_DIGEST).digest() + data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    _remove_oldest(folder)


def _is_folder_of_ours(folder: str) -> bool:
    """Whether plans may be kept there; it is made, but not in another user's home, where it would be in the way."""
    caches = os.path.dirname(folder)
    if not os.path.isdir(caches):
        if os.stat(os.path.dirname(caches)).st_uid != os.geteuid():
            return False
        os.mkdir(caches, 0o700)
    if not os.path.lexists(folder):
        if os.stat(caches).st_uid != os.geteuid():
            return False
        os.mkdir(folder, 0o700)
    return _is_own(os.lstat(folder), stat.S_IFDIR)


def _remove_oldest(folder: str) -> None:
    """Of the files that were kept; also what a killed process has left of one."""
    paths = [os.path.join(folder, name) for name in os.listdir(folder) if _NAME.fullmatch(name)]
    for path in sorted(paths, key=lambda path: os.lstat(path).st_mtime)[:-MOST]:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _read_own(path: str) -> bytes | None:
    """A file's bytes, if only this user can have written it."""
    try:
        if not _is_own(os.lstat(os.path.dirname(path)), stat.S_IFDIR):
            return None
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            return file.read() if _is_own(os.fstat(file.fileno()), stat.S_IFREG) else None
    except OSError:
        return None


def _is_own(found: os.stat_result, kind: int) -> bool:
    """A folder or a file, and no link to one, that no other user can write to."""
    if stat.S_IFMT(found.st_mode) != kind:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_whole(data: bytes) -> bool:
    """Whether it begins with the digest of the rest."""
    return hashlib.blake2b(data[_DIGEST:], digest_size=_DIGEST).digest() == data[:_DIGEST]
