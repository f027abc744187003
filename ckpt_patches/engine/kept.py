"""Plans of trees, kept between processes: else each process of a job parses and compiles the same files again.

A kept plan is used where nothing that it was made from has changed: our own code, the text of every upstream file that
was looked at, the files that were not there, the interpreter. It lies in the user's cache folder and not beside
upstream's files, whose folders would then outlive an uninstall, and still be found by `import`. What lies there is run:
it has to belong to this user, in a folder that nobody else can write to, and be whole.
"""

import hashlib
import importlib.util
import marshal
import os
import stat
import sys
from collections.abc import Sequence
from types import CodeType

from ckpt_patches.engine.fix import folder as folder_of_fixes
from ckpt_patches.engine.plan import FilePlan, FixResult, Outcome, TreePlan, module_path, plan_tree, text_digest
from ckpt_patches.ranks import is_rank_zero

# More trees than a machine uses; the oldest go.
MOST = 32
_MAGIC = b"ckpt-patches plan 1\n"
_DIGEST = 32  # bytes

_Results = list[tuple[str, str, tuple[str, ...]]]  # name, outcome, modules
_Files = list[tuple[str, bytes, CodeType, tuple[str, ...]]]  # module, edited text, its code, fixes


def plan_or_kept(root: str, package: str, names: Sequence[str]) -> TreePlan:
    """What `plan_tree` returns for these fixes, from an earlier process if nothing has changed since.

    The first process of a group keeps the plan that it has made; as Python does with bytecode, in silence where that
    cannot be, and not where Python is told to write none (`PYTHONDONTWRITEBYTECODE`).
    """
    folder = cache_folder()
    if not folder:
        return plan_tree(root, package, names)
    key = _key(root, package, names)
    path = os.path.join(folder, _file_name(root, package, names))
    plan = _read(path, key, root, package)
    if plan is None:
        plan = plan_tree(root, package, names)
        # What does not match is looked at each time: its reason may be gone.
        if not plan.named(Outcome.NO_MATCH) and not sys.dont_write_bytecode and is_rank_zero(os.environ):
            _keep(plan, path, key)
    return plan


def cache_folder() -> str:
    """`ckpt-patches` in the user's folder for caches; empty if there is no such folder."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(caches, "ckpt-patches") if os.path.isabs(caches) else ""


def _file_name(root: str, package: str, names: Sequence[str]) -> str:
    """One a tree, choice of fixes and interpreter: whatever else changes, the new plan takes the old one's place."""
    what = "\n".join([root, *names, sys.version, str(sys.flags.optimize)])
    digest = hashlib.blake2b(what.encode(errors="surrogateescape"), digest_size=8).hexdigest()
    return f"{package}-{sys.implementation.cache_tag}-{digest}.plan"


def _key(root: str, package: str, names: Sequence[str]) -> bytes:
    """A digest of what a plan is made from besides upstream's files."""
    digest = hashlib.blake2b(importlib.util.MAGIC_NUMBER, digest_size=_DIGEST)
    for part in [sys.version, str(sys.flags.optimize), root, package, *names]:
        digest.update(part.encode(errors="surrogateescape") + b"\0")
    for folder in (os.path.dirname(os.path.abspath(__file__)), folder_of_fixes(package)):
        for name in sorted(os.listdir(folder)):
            if name.endswith(".py"):
                with open(os.path.join(folder, name), "rb") as file:
                    digest.update(name.encode() + b"\0" + text_digest(file.read()))
    return digest.digest()


def _read(path: str, key: bytes, root: str, package: str) -> TreePlan | None:
    """The plan in a file; None if there is none, or it is not for the tree as it is."""
    data = _whole(_read_own(path))
    if data is None:
        return None
    kept_key, results, texts, files = marshal.loads(data)
    originals = _unchanged(root, texts) if kept_key == key else None
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
        except OSError:
            return None
        if text_digest(found[module]) != digest:
            return None
    return found


def _keep(plan: TreePlan, path: str, key: bytes) -> None:
    """Write a plan, whole or not at all."""
    results: _Results = [(result.name, result.outcome.value, result.modules) for result in plan.results]
    files: _Files = [(file.module, file.patched, file.code, file.fixes) for file in plan.files.values()]
    data = marshal.dumps((key, results, plan.texts, files))
    temporary = f"{path}.{os.urandom(8).hex()}"
    try:
        folder = os.path.dirname(path)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if not _is_own(os.stat(folder)):
            return
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.blake2b(data, digest_size=_DIGEST).digest() + data)
                file.flush()
                os.fsync(descriptor)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
        _remove_oldest(folder)
    except OSError:  # a full disk, a folder that is another's: the next process makes its own plan
        pass


def _remove_oldest(folder: str) -> None:
    paths = [os.path.join(folder, name) for name in os.listdir(folder)]  # and what a killed process left behind
    for path in sorted(paths, key=lambda path: os.stat(path).st_mtime)[:-MOST]:
        os.unlink(path)


def _read_own(path: str) -> bytes | None:
    """A file's bytes, if only this user can have written it."""
    try:
        if not _is_own(os.stat(os.path.dirname(path))):
            return None
        with open(path, "rb") as file:
            return file.read() if _is_own(os.fstat(file.fileno())) else None
    except OSError:
        return None


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _whole(data: bytes | None) -> bytes | None:
    """What stands in a kept file, without its digest; None if that is not the digest of the rest."""
    if data is None or not data.startswith(_MAGIC):
        return None
    start = len(_MAGIC) + _DIGEST
    whole = hashlib.blake2b(data[start:], digest_size=_DIGEST).digest() == data[len(_MAGIC) : start]
    return data[start:] if whole else None
