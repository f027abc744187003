"""Run a function on processes of this machine, and collect what each of them returns."""

import contextlib
import json
import os
import random
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class RankError(Exception):
    """A rank has raised an error: its type and the first sentence of its message."""


def results(rank_main: Callable[..., Any], ranks: int, *args: object) -> list[Any]:
    """What `rank_main(rank, *args)` returns on each rank, as JSON. The ranks are forked: packages are imported once.

    Raises:
        RankError: a rank has raised an error; the other ranks are ended.
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
        message = re.split(r"\. |\n", str(error).strip())[0]
        Path(folder, f"{rank}.error").write_text(f"{type(error).__name__}: {message}".removesuffix(": "))
        raise
    Path(folder, str(rank)).write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Gloo and DeepSpeed leave threads behind


def _cause(folder: Path) -> str:
    """A rank that has lost the connection to another one raises an error, too: prefer any other error."""
    found = [path.read_text() for path in sorted(folder.glob("*.error"))]
    errors = [text for text in found if text]  # a rank may have been ended while it wrote
    return next((text for text in errors if "onnection" not in text), errors[0] if errors else "")


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now, and that no connection is given meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10000, 32768)  # below those that Linux gives to connections
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def wait_for(files: list[Path], seconds: float = 60) -> None:
    """Until another process has made all of these files, but no longer."""
    deadline = time.time() + seconds
    while time.time() < deadline and not all(file.exists() for file in files):
        time.sleep(0.01)


def call_after(sign: Path, call: Callable[..., None], *args: Any, **keywords: Any) -> None:
    """Call once another process has made a file: a writer in the background that is held back."""
    wait_for([sign])
    call(*args, **keywords)
