"""Run a function on several processes of this machine, and collect the return values."""

import contextlib
import json
import os
import random
import re
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class RankError(Exception):
    """A rank raised an error: its type and the first sentence of its message; `full` has the whole message."""

    def __init__(self, full: str) -> None:
        self.full = full
        super().__init__(re.split(r"\. |\n", full)[0])


def results(rank_main: Callable[..., Any], ranks: int, *args: object) -> list[Any]:
    """The return values (JSON types) of `rank_main(rank, *args)`. Ranks are forked: packages are imported once.

    Raises:
        RankError: a rank raised an error; the other ranks are ended.
    """
    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as folder:
        try:
            processes.start_processes(_keep_result, (folder, rank_main, args), nprocs=ranks, start_method="fork")
        except (processes.ProcessRaisedException, processes.ProcessExitedException) as error:
            raise RankError(_cause(Path(folder)) or str(error)) from error
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]


def _keep_result(rank: int, folder: str, rank_main: Callable[..., Any], args: tuple[object, ...]) -> None:
    try:
        result = rank_main(rank, *args)
    except Exception as error:
        Path(folder, f"{rank}.error").write_text(f"{type(error).__name__}: {str(error).strip()}".removesuffix(": "))
        traceback.print_exc()  # torch shows that of one rank: it may be one that has lost the connection to this one
        raise
    Path(folder, str(rank)).write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Gloo and DeepSpeed leave threads behind


def _cause(folder: Path) -> str:
    """The first error in rank order that is not a lost connection to a failed rank, else the first error."""
    found = [path.read_text() for path in sorted(folder.glob("*.error"))]
    errors = [text for text in found if text]  # empty if a rank was killed while writing
    lost = ("onnection", "gloo/transport")
    others = (text for text in errors if not any(word in text.partition("\n")[0] for word in lost))
    return next(others, errors[0] if errors else "")


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, in rank order."""
    from torch import distributed

    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def patience(seconds: float) -> float:
    """These seconds of a fast machine, times the environment variable CKPT_PATCHES_TEST_PATIENCE."""
    return seconds * float(os.environ.get("CKPT_PATCHES_TEST_PATIENCE", "1"))


def free_port() -> int:
    """A TCP port of this machine that is free, and that Linux does not assign to connections."""
    while True:
        port = random.SystemRandom().randrange(10000, 32768)  # below the ephemeral ports of Linux
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def wait_for(files: list[Path], seconds: float = 60) -> None:
    """Wait until all of these files exist, or until the time is over."""
    deadline = time.time() + seconds
    while time.time() < deadline and not all(file.exists() for file in files):
        time.sleep(0.01)


def call_after(sign: Path, call: Callable[..., None], *args: Any, **keywords: Any) -> None:
    """Call a function once a file exists: delays a background writer."""
    wait_for([sign])
    call(*args, **keywords)
