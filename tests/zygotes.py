"""Run programs as forks of a process that has imported what they import; see programs/zygote.py.

`import torch` and that of an upstream package take two to four seconds, most of what a program takes. So one process
imports torch; a fork of it for each tree, delivery and environment imports the upstream package, by the real import
hook where that is the delivery, and forks for all processes of a run of the tests. A program whose imports are not
known gets an interpreter of its own, as does one that is about how an interpreter starts.
"""

import atexit
import contextlib
import fcntl
import hashlib
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

import shared

PROGRAMS = Path(__file__).resolve().parent / "programs"
ZYGOTE = PROGRAMS / "zygote.py"

MEGATRON = (
    "ckpt_patches.demo.megatron_training",  # first: the stand-in for a GPU has to be there before Megatron is
    "megatron.core.dist_checkpointing",
    "megatron.core.optimizer",
    "ckpt_patches.demo.stand_in_fused_adam",
    "torch._dynamo",
)
CORE = ("megatron.core.dist_checkpointing", "megatron.core.optimizer", "torch._dynamo")  # without stand-ins
BRIDGE = ("bridge_imports", "megatron.core.optimizer", "torch._dynamo")
ZARR = ("ckpt_patches.demo.zarr_saving", "megatron.core.dist_checkpointing.strategies.zarr")
NO_PACKAGE = ("torch",)
DEEPSPEED = ("deepspeed.checkpoint.ds_to_universal", "ckpt_patches.demo.deepspeed_training")

# The modules that a program of programs/ imports, whichever arguments it is given.
IMPORTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "async_saving",
            "empty_state",
            "exact_resume",
            "gather_on_many_ranks",
            "gpt_resume",
            "hybrid_reload",
            "lean_gather",
            "megatron_saving",
            "padded_saving",
            "param_groups",
            "ranks_that_differ",
            "shifted_saving",
        ),
        MEGATRON,
    ),
    "bridge_finetune": BRIDGE,
    **dict.fromkeys(("numpy2_product", "strip_shapes"), CORE),
    **dict.fromkeys(("damaged_zero", "load_distcp"), NO_PACKAGE),
    **dict.fromkeys(("zarr_failures", "zarr_interleavings", "zarr_race", "zarr_ranges"), ZARR),
    **dict.fromkeys(("convert", "foreign_files", "own_files", "same_universal", "strip_paddings"), DEEPSPEED),
    **dict.fromkeys(("autoep_training", "experts", "universal_loading"), DEEPSPEED),
    **dict.fromkeys(("zero_resuming", "zero_training"), DEEPSPEED),
    **dict.fromkeys(("write_dp768_checkpoint", "write_parallel_checkpoint", "write_sparse_ranks"), DEEPSPEED),
}

# What all of these import of torch, and is the same for all trees: half of the time of their imports and more.
TORCH = ("torch", "torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.testing")
WITH_TORCH = (MEGATRON, BRIDGE, ZARR, DEEPSPEED, CORE, NO_PACKAGE)

# Read when a program runs, and by no import.
PER_RUN = ("MASTER_PORT", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")

# Of one test process.
AT_ONCE = 30


class NotStarted(RuntimeError):
    """A process could not import the modules."""


class Zygote:
    """A process that has imported modules in an environment, and serves this one alone."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str], base: "Zygote | None" = None) -> None:
        """Have it forked from the one of the run with these imports, which is started unless it is there.

        With a base it is started as a fork of that, whose environment is that of `environment_of_base`.

        Raises:
            NotStarted: an import failed, or left a thread behind; with what it said.
        """
        what = json.dumps([sys.executable, list(modules), sorted(environment.items())])
        self._path = shared.folder() / f"zygote-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
        self._lock = threading.Lock()
        self._lifeline: IO[bytes] | None = None  # what the ancestor ends with, if this one has started it
        with open(f"{self._path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            ready = self._connect()
            if not ready:
                self._start(environment, modules, base)
                ready = self._connect()
        self._said = tuple(Path(f"{self._path}.{name}").read_text(errors="replace") for name in ("out", "err"))
        if not ready:
            self.end()
            raise NotStarted(f"{' '.join(modules)} could not be imported:\n{''.join(self._said)}")
        self.pid, self.ancestor = map(int, ready.split())

    def _connect(self) -> bytes:
        """What the process that serves this one says first; nothing if there is none."""
        self._requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._requests.connect(f"{self._path}.socket")
            return self._requests.recv(100)
        except (FileNotFoundError, ConnectionError):
            self._requests.close()
            return b""

    def _start(self, environment: Mapping[str, str], modules: Sequence[str], base: "Zygote | None") -> None:
        Path(f"{self._path}.socket").unlink(missing_ok=True)
        reading, writing = os.pipe()
        self._lifeline = os.fdopen(writing, "wb")
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening,
            open(reading, "rb") as ends,
            open(f"{self._path}.out", "wb") as out,
            open(f"{self._path}.err", "wb") as err,
        ):
            listening.bind(f"{self._path}.socket")
            listening.listen()
            files = [ends.fileno(), out.fileno(), err.fileno(), listening.fileno()]
            if base is None:
                command = [sys.executable, str(ZYGOTE), str(listening.fileno()), *modules]
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=ends,
                    stdout=out,
                    stderr=err,
                    pass_fds=files[3:],
                    start_new_session=True,
                ).wait()
            else:
                request = {"modules": list(modules), "environment": dict(environment)}
                with base._lock:
                    socket.send_fds(base._requests, [json.dumps(request).encode()], files)
                    base._requests.recv(100)

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
        """End the process and, should there be one, the program that it runs; those of other clients go on."""
        self._requests.close()
        if self._lifeline is not None:
            self._lifeline.close()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


_zygotes: OrderedDict[tuple[object, ...], Zygote] = OrderedDict()


def zygote_for(environment: Mapping[str, str], modules: Sequence[str]) -> Zygote:
    """The one of this test process that has these modules, and this environment but for what is `PER_RUN`."""
    lasting = {name: value for name, value in environment.items() if name not in PER_RUN}
    key = (tuple(modules), *sorted(lasting.items()))
    if key not in _zygotes:
        base = zygote_for(environment_of_base(lasting), TORCH) if modules in WITH_TORCH else None
        if len(_zygotes) >= AT_ONCE:
            _zygotes.popitem(last=False)[1].end()
        _zygotes[key] = Zygote(lasting, modules, base)
    _zygotes.move_to_end(key)
    return _zygotes[key]


def environment_of_base(environment: Mapping[str, str]) -> dict[str, str]:
    """That of a process which imports torch alone: without the hook, with no folder but those that torch looks in."""
    kept = {name: value for name, value in environment.items() if not name.startswith("CKPT_PATCHES")}
    folders = [folder for folder in environment["PYTHONPATH"].split(os.pathsep) if _is_for_torch(Path(folder))]
    return {**kept, "CKPT_PATCHES": "off", "PYTHONPATH": os.pathsep.join(folders)}


def _is_for_torch(folder: Path) -> bool:
    return any((folder / name).is_dir() for name in ("numpy", "torch", "triton"))


def run(
    program: Path, arguments: Sequence[str], *, environment: Mapping[str, str], timeout: float, imports: Sequence[str]
) -> "subprocess.CompletedProcess[str]":
    """Run a program as subprocess.run does: where it imports these modules, as a fork of a process that has.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds, and was killed.
    """
    argv, zygote = [str(program), *arguments], None
    if imports:
        with contextlib.suppress(NotStarted):  # then the program's own imports say why
            zygote = zygote_for(environment, imports)
    if zygote is None:
        command = [sys.executable, *argv]
        return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=timeout)
    variables = {name: environment.get(name) for name in PER_RUN}
    return zygote.run(argv, cwd=os.getcwd(), environment=variables, timeout=timeout)


@atexit.register
def end_all() -> None:
    while _zygotes:
        _zygotes.popitem()[1].end()
