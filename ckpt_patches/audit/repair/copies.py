"""Copy a checkpoint, and write elements into the copy. No link is followed out of either."""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_patches.formats.checkpoint import Stream
from ckpt_patches.formats.dtypes import item_size
from ckpt_patches.formats.paths import path_within
from ckpt_patches.formats.ranged import open_regular
from ckpt_patches.formats.zarr import LOCKS
from ckpt_patches.runtime.unfinished import UnfinishedFolder, check_outside, check_parent, check_space
from ckpt_patches.runtime.units import in_bytes

BUFFER = 1 << 22  # bytes


@contextmanager
def new_copy(path: Path, output: Path, older: Path | None) -> Iterator[Path]:
    """A path for the copy, in a folder beside the output, which is removed in the end, or by the next repair.

    Raises:
        UserError: the output exists, or another repair writes it now.
    """
    check_outside(path, output)
    check_parent(output)
    work = UnfinishedFolder(output, "repair", os.path.realpath(path), path, *filter(None, [older]))
    check_outside(work.working, path)  # which is removed
    work.check({})
    with work.held():
        try:
            copy = work.working / work.final.name  # a folder's name has a meaning for readers
            shutil.rmtree(copy, ignore_errors=True)  # of a repair that was killed
            yield copy
        finally:
            work.discard()


def copy_checkpoint(path: Path, copy: Path, output: Path, say: Callable[[str], object]) -> None:
    """Copy a checkpoint, without directories of locks. The owner can write to the copy.

    Of a folder that several links lead to there is one copy, and links to it: links in it can double it any times.

    Raises:
        UserError: a link leads out of the checkpoint, or there is too little room.
        OSError: a file cannot be read or written, or is a pipe or a device.
    """
    nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    free = check_space(output, nbytes)
    say(f"{output}: copying {in_bytes(nbytes)}, and {in_bytes(free)} are free")
    copies: dict[str, Path] = {}  # by the folder itself
    for folder, folders, names in os.walk(path, followlinks=True, onerror=_give_up):
        inner = Path(folder).relative_to(path)
        target = copy / inner
        if (same := copies.setdefault(os.path.realpath(folder), target)) != target:
            target.symlink_to(os.path.relpath(same, target.parent))
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.endswith(LOCKS)]
        target.mkdir(mode=stat.S_IMODE(os.stat(folder).st_mode) | stat.S_IRWXU)
        for name in (*folders, *names):
            source = path_within(path, str(inner / name))
            if name in names:
                _copy_file(source, target / name)


def _give_up(error: OSError) -> None:
    raise error


def _copy_file(source: Path, target: Path) -> None:
    with os.fdopen(open_regular(source), "rb") as reading:
        mode = stat.S_IMODE(os.fstat(reading.fileno()).st_mode) | stat.S_IWUSR
        with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as writing:
            shutil.copyfileobj(reading, writing, BUFFER)


def write_elements(target: Stream, begin: int, data: memoryview) -> None:
    """Write elements from `begin` on. A missing file is created."""
    for path, offset, nbytes in target.part(begin, begin + len(data) // item_size(target.dtype)):
        with open(path, "r+b" if os.path.exists(path) else "wb") as file:
            file.seek(offset)
            file.write(data[:nbytes])
        data = data[nbytes:]
