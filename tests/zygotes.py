"""Run programs as forks of a process that has imported what they import; see programs/zygote.py.

`import torch` and that of an upstream package take two to four seconds, most of what a program takes. So one process a
tree, delivery and environment imports them, by the real import hook where that is the delivery, and forks for each run.
A program that is not named here gets an interpreter of its own, and so does one that is about how one starts.
"""

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

PROGRAMS = Path(__file__).resolve().parent / "programs"
ZYGOTE = PROGRAMS / "zygote.py"

_MEGATRON = (
    "megatron_training",  # first: the stand-in for a GPU has to be there before Megatron is
    "megatron.core.dist_checkpointing",
    "megatron.core.optimizer",
    "stand_in_fused_adam",
    "torch._dynamo",
)
_ZARR = ("zarr_saving", "megatron.core.dist_checkpointing.strategies.zarr")
_CONVERTER = ("deepspeed.checkpoint.ds_to_universal",)
_DEEPSPEED = (*_CONVERTER, "zero_training")

# The modules that a program imports, whichever arguments it is given.
IMPORTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("empty_state", "exact_resume", "hybrid_reload", "lean_gather", "megatron_saving"), _MEGATRON),
    **dict.fromkeys(("zarr_failures", "zarr_interleavings", "zarr_race", "zarr_ranges"), _ZARR),
    **dict.fromkeys(("own_files", "zero_training"), _DEEPSPEED),
    **dict.fromkeys(
        ("convert", "foreign_files", "same_universal", "write_dp768_checkpoint", "write_parallel_checkpoint"),
        _CONVERTER,
    ),
}

# Read when a program runs, and by no import.
PER_RUN = ("MASTER_PORT", "PYTEST_CURRENT_TEST", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")

# Of one test process. Each takes about 200 MB of memory.
AT_ONCE = 6


class NotStarted(RuntimeError):
    """A process could not import the modules."""


class Zygote:
    """A process that has imported modules in an environment."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        """Start it.

        Raises:
            NotStarted: an import failed, or left a thread behind; with what it said.
        """
        self._lock = threading.Lock()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            self.process = subprocess.Popen(
                [sys.executable, str(ZYGOTE), str(theirs.fileno()), *modules],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            theirs.close()
            ready = self._requests.recv(100)
            self._said = _text(out), _text(err)
        if not ready:
            self.end()
            raise NotStarted(f"{' '.join(modules)} could not be imported:\n{''.join(self._said)}")

    def run(
        self, argv: Sequence[str], *, cwd: str, environment: Mapping[str, str | None], timeout: float
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program with these variables set (None: not set); its output begins with what the imports said.

        Raises:
            subprocess.TimeoutExpired: it took longer than `timeout` seconds, and was killed.
            RuntimeError: this process has been killed.
        """
        request = json.dumps({"argv": list(argv), "cwd": cwd, "environment": dict(environment)})
        with self._lock, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            socket.send_fds(self._requests, [request.encode()], [out.fileno(), err.fileno()])
            self._requests.settimeout(timeout)
            try:
                status = self._requests.recv(100)
            except TimeoutError:
                self._requests.settimeout(None)
                self._requests.send(b"kill")
                self._requests.recv(100)
                raise subprocess.TimeoutExpired(list(argv), timeout, _text(out), _text(err)) from None
            if not status:
                raise RuntimeError(f"the process that was to fork for {argv[0]} is gone: {_text(err)}")
            said = [before + _text(file) for before, file in zip(self._said, (out, err), strict=True)]
        return subprocess.CompletedProcess([sys.executable, *argv], int(status), *said)

    def end(self) -> None:
        """End the process and, should there be one, the program that it runs."""
        self._requests.close()
        self.process.wait()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


_zygotes: OrderedDict[tuple[object, ...], Zygote] = OrderedDict()


def zygote_for(environment: Mapping[str, str], modules: Sequence[str]) -> Zygote:
    """The one of this test process that has these modules, and this environment but for what is `PER_RUN`."""
    lasting = {name: value for name, value in environment.items() if name not in PER_RUN}
    key = (tuple(modules), *sorted(lasting.items()))
    if key not in _zygotes:
        if len(_zygotes) == AT_ONCE:
            _zygotes.popitem(last=False)[1].end()
        _zygotes[key] = Zygote(lasting, modules)
    _zygotes.move_to_end(key)
    return _zygotes[key]


def run(
    program: Path, arguments: Sequence[str], *, environment: Mapping[str, str], timeout: float
) -> "subprocess.CompletedProcess[str]":
    """Run one of the programs in `IMPORTS`, or any other one in an interpreter of its own, as subprocess.run does.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds, and was killed.
    """
    argv = [str(program), *arguments]
    modules = IMPORTS.get(program.stem) if program.parent == PROGRAMS else None
    zygote = None
    if modules is not None:
        with contextlib.suppress(NotStarted):  # then the program's own imports say why
            zygote = zygote_for(environment, modules)
    if zygote is None:
        command = [sys.executable, *argv]
        return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=timeout)
    variables = {name: environment.get(name) for name in PER_RUN}
    return zygote.run(argv, cwd=os.getcwd(), environment=variables, timeout=timeout)


@atexit.register
def end_all() -> None:
    while _zygotes:
        _zygotes.popitem()[1].end()
