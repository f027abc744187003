"""Run a tool whose Nth file-system change or sync fails with an error of the disk.

failing_disk.py ERRNO N convert|migrate INPUT OUTPUT     the tool's exit status, or 99 if it ends before that change
"""

import errno
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from file_changes import before_each_change

number, left = getattr(errno, sys.argv[1]), int(sys.argv[2])
tool, source, output = sys.argv[3:]
fsync = os.fsync


def fail_in_time(event: str, arguments: tuple[Any, ...]) -> None:
    """Fail once. Forked workers continue the count from their fork."""
    global left
    left -= 1
    if left == -1:
        raise OSError(number, os.strerror(number), os.fsdecode(arguments[0]) if event != "os.fsync" else None)


def failing_fsync(descriptor: int) -> None:
    fail_in_time("os.fsync", (descriptor,))
    fsync(descriptor)


def main() -> int:
    from ckpt_patches import cli
    from ckpt_patches.convert import convert_command
    from ckpt_patches.migrate import migrate  # noqa: F401 - with its dependencies, before the first change counts
    from ckpt_patches.migrate import output as files

    files.FILE = 1000  # bytes: for several files
    before_each_change(fail_in_time)
    os.fsync = failing_fsync  # type: ignore[assignment]
    paths = [source, "--output", output, "--workers", "1"]
    return convert_command.main(paths) if tool == "convert" else cli.main([tool, *paths])


status = main()
sys.exit(99 if left >= 0 and status == 0 else status)
