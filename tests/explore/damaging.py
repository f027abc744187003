"""Damage a file of a checkpoint: cut it off, remove it, or put the one of another step in its place."""

from pathlib import Path

ALTERED, OTHER_STEP = "altered", "other step"
LOST = ("zeros", "NaN")  # half of a tensor, while it is saved
DAMAGES = ("truncated", "absent", OTHER_STEP)
# What a checkpoint may have and be whole: one element more, zeros of a bias, the same in a file of another step.
UNSEEN = (ALTERED, OTHER_STEP, *LOST)
UNREAD = "expp_rank_"  # with ZeRO it holds no state, and no load reads it; without, the states of experts


def damage(checkpoint: Path, other: Path, how: str, number: int, *, without_zero: bool = False) -> str:
    """Damage the file of this number, counted again from the first; its name, or nothing where there is none to damage.

    `other` is a checkpoint of another step. One of a single file is whole with the other's.
    """
    found = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    files = [path for path in found if without_zero or not path.name.startswith(UNREAD)]
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
