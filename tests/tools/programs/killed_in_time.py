"""Convert or migrate a checkpoint, and kill all its processes just before the Nth file-system change.

killed_in_time.py convert|migrate INPUT OUTPUT N     prints "done" if it ends before that change
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from file_changes import before_each_change

left = int(sys.argv[4])


def convert(source: str, output: str) -> None:
    from ckpt_patches.convert.convert import Options, convert

    before_each_change(kill_in_time)
    convert(source, output, Options(workers=1))


def migrate(source: str, output: str) -> None:
    from ckpt_patches.migrate import output as files
    from ckpt_patches.migrate.migrate import Options, migrate

    files.FILE = 1000  # bytes: for several files
    before_each_change(kill_in_time)
    migrate(Path(source), Path(output), Options(workers=1), warn=lambda _: None)


def kill_in_time(event: str, arguments: tuple[Any, ...]) -> None:
    """Forked workers continue the count from their fork."""
    global left
    left -= 1
    if left < 0:
        os.killpg(0, signal.SIGKILL)


os.setpgid(0, 0)
{"convert": convert, "migrate": migrate}[sys.argv[1]](sys.argv[2], sys.argv[3])
print("done")
