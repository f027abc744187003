"""Convert a checkpoint, and be killed with all workers just before the Nth change in the file system.

killed_conversion.py INPUT OUTPUT N         prints "done" if it has come to its end before that
"""

import os
import signal
import sys
from typing import Any

from deepspeed_patches.ds_to_universal import Options, convert

WRITING = os.O_WRONLY | os.O_RDWR
left = int(sys.argv[3])


def kill_in_time(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook; forked workers have it too, and count on from where they began."""
    global left
    if event in ("os.rename", "os.remove", "os.mkdir", "os.link") or (event == "open" and arguments[2] & WRITING):
        left -= 1
        if left < 0:
            os.killpg(0, signal.SIGKILL)


os.setpgid(0, 0)
sys.addaudithook(kill_in_time)
convert(sys.argv[1], sys.argv[2], Options(workers=1))
print("done")
