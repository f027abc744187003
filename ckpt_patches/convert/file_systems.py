"""Which file systems are written to past the page cache: local ones, of which it is known to be right and quicker."""

import os
from pathlib import Path
from typing import Literal

Direct = Literal["auto", "on", "off"]
MOUNTS = Path("/proc/self/mountinfo")
# On those of clusters (Lustre, GPFS, NFS, FUSE) direct writes are known to nobody here: some take locks for each, some
# are slow without the servers' read-ahead, some refuse them in the middle of a file.
LOCAL = ("ext4", "xfs")


def writes_directly(folder: Path, direct: Direct, *, sync: bool) -> bool:
    """Whether files below a folder, which need not be there yet, are written past the page cache.

    Without `sync` nobody waits for the disk, and the page cache is where the bytes are to go.
    """
    if direct == "auto":
        return sync and file_system(folder) in LOCAL
    return direct == "on"


def file_system(folder: Path) -> str:
    """The type of the file system that a folder is on, or will be; '' where that cannot be told."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        mounts = MOUNTS.read_text(errors="replace")
    except OSError:
        return ""
    return type_of(existing.stat().st_dev, mounts)


def type_of(device: int, mounts: str) -> str:
    """The type of the file system with a device number, by the text of `/proc/self/mountinfo`; '' if it is not there.

    A line is `27 1 254:0 /root /mount options... [fields...] - type source options`. (proc(5))
    """
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        mount, _, file_system = line.partition(" - ")
        if mount.split()[2:3] == [wanted]:
            return file_system.partition(" ")[0]
    return ""
