"""Damage a file of a checkpoint: truncate it, remove it, or replace it with the file of another step."""

from pathlib import Path

ALTERED, OTHER_STEP = "altered", "other step"
LOST = ("zeros", "NaN")  # these values replace half of a tensor during the save
DAMAGES = ("truncated", "absent", OTHER_STEP)
# A complete checkpoint may contain each of these: one altered element, zeros in a bias, equal data from another step.
UNSEEN = (ALTERED, OTHER_STEP, *LOST)
UNREAD = "expp_rank_"  # with ZeRO no load reads this file; without ZeRO it holds the states of experts


def damage(checkpoint: Path, other: Path, how: str, number: int, *, without_zero: bool = False) -> str:
    """Damage one file and return its name. Return an empty string if no file qualifies.

    `number` selects the file and wraps around. `other` is a checkpoint of another step. A checkpoint with all data in a
    single file stays complete when the file of `other` replaces it.
    """
    found = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    files = [path for path in found if without_zero or not path.name.startswith(UNREAD)]
    if how == OTHER_STEP:
        is_single = len(files) == 1 or sum(path.suffix == ".distcp" for path in files) == 1
        files = [path for path in files if not is_single and is_other(path, other / path.name)]
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
