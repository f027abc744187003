"""Damage a file of a checkpoint: cut it off, remove it, or put the one of another step in its place."""

from pathlib import Path

ALTERED, OTHER_STEP = "altered", "other step"
DAMAGES = ("truncated", "absent", OTHER_STEP)
UNSEEN = (ALTERED, OTHER_STEP)  # which a checkpoint may have and be whole: by one element more, or with the same in it
UNREAD = "expp_rank_"  # with ZeRO it holds no state, and no load reads it


def damage(checkpoint: Path, other: Path, how: str, number: int) -> str:
    """Damage the file of this number, counted again from the first; its name, or nothing where there is none to damage.

    `other` is a checkpoint of another step. One of a single file is whole with the other's.
    """
    found = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    files = [path for path in found if not path.name.startswith(UNREAD)]
    if how == OTHER_STEP:
        files = [path for path in files if len(files) > 1 and is_other(path, other / path.name)]
    if not files:
        return ""
    file = files[number % len(files)]
    if how == "truncated":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif how == "absent":
        file.unlink()
    else:
        file.write_bytes((other / file.name).read_bytes())
    return file.name


def is_other(path: Path, other: Path) -> bool:
    return other.exists() and path.read_bytes() != other.read_bytes()
