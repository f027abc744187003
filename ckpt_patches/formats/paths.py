"""Paths from file names in an untrusted checkpoint. No name may lead out of the checkpoint's folder."""

import os
from pathlib import Path, PurePosixPath

from ckpt_patches.errors import UserError
from ckpt_patches.runtime.shown import shown


class LeavesFolderError(UserError):
    """A name in a checkpoint that leads out of its folder."""


class LinkOutsideError(LeavesFolderError):
    """A link in a checkpoint that leads out of its folder. The file may be sound; it is not read."""


def path_within(folder: Path, name: object) -> Path:
    """The path of a file that a checkpoint names. It is below the folder, also after links are resolved.

    Raises:
        LeavesFolderError: the name is not relative, or contains `..`.
        LinkOutsideError: a link leads out of the folder.
    """
    if not is_within(name):
        raise LeavesFolderError(f"{folder}: expected the name of a file in this folder, found {shown(name)}")
    path = folder / str(name)
    if not _has_link(str(folder), path.relative_to(folder).parts):
        return path
    try:
        is_inside = any(map(path.resolve().is_relative_to, _roots(folder.resolve())))
    except (OSError, RuntimeError):  # a link to itself
        raise LinkOutsideError(f"{path} is a link that leads nowhere") from None
    if not is_inside:
        raise LinkOutsideError(
            f"{path} is a link to {path.resolve()}, outside of the checkpoint: put the file itself there"
        )
    return path


def _roots(folder: Path) -> list[Path]:
    """A checkpoint's folder; in Hugging Face's cache, whose `snapshots/<commit>` are links, `blobs` beside them too."""
    return [folder, folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [folder]


def _has_link(folder: str, parts: tuple[str, ...]) -> bool:
    """Whether a path below a folder goes through a link. Resolving takes many times as long, for thousands of files."""
    for part in parts:
        folder = os.path.join(folder, part)
        if os.path.islink(folder):
            return True
    return False


def is_within(name: object) -> bool:
    """Whether a name is a relative path that stays below its folder."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half of a character, which no file's name has
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts
