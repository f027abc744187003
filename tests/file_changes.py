"""Call a function just before each file-system change of this process.

Tests use it to kill or fail the process at each change in turn. It cannot be undone: do it in a child process.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR
CHANGES = {
    *("os.rename", "os.remove", "os.link", "os.symlink", "os.mkdir", "os.rmdir"),
    *("os.truncate", "os.chmod", "os.chown"),
}

# Takes an event of https://docs.python.org/3/library/audit_events.html and its arguments; may raise or exit.
Act = Callable[[str, tuple[Any, ...]], object]


def is_change(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an audit event announces a file-system change. Writes to an open file have no event."""
    is_writing = event == "open" and bool(arguments[2] & WRITING) and not isinstance(arguments[0], int)
    return event in CHANGES or is_writing  # a file object of an open descriptor changes nothing


def before_each_change(act: Act) -> None:
    """Call `act` just before each change, in this process and its forks."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if is_change(event, arguments):
            act(event, arguments)

    sys.addaudithook(hook)


def in_child(run: Callable[[], Any]) -> tuple[int, Any]:
    """Run a function in a forked child: 0 and its result (via JSON), or the negative signal that killed it and None."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(run()).encode())
        except BaseException:
            os.write(writing, json.dumps(traceback.format_exc()).encode())
            os._exit(70)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        answer = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    result = json.loads(answer) if answer else None
    assert status != 70, result
    return status, result
