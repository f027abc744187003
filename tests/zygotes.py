"""Run programs as forks of a process that already imported their modules; see programs/zygote.py.

Importing torch and an upstream package takes two to four seconds, most of a program's run time. So one process imports
torch. For each tree, delivery and environment, a fork of it imports the upstream package (with the real import hook if
that is the delivery) and then forks for all processes of the test run. A program with unknown imports, or one that
tests how an interpreter starts, runs in its own interpreter.
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
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import shared

PROGRAMS = Path(__file__).resolve().parent / "programs"
ZYGOTE = PROGRAMS / "zygote.py"

MEGATRON = (
    "trainers.megatron_training",  # first: the GPU stub must exist before Megatron's import
    "megatron.core.dist_checkpointing",
    "megatron.core.optimizer",
    "trainers.stub_fused_adam",
    "torch._dynamo",
)
CORE = ("megatron.core.dist_checkpointing", "megatron.core.optimizer", "torch._dynamo")  # without stubs
BRIDGE = ("bridge_imports", "megatron.core.optimizer", "torch._dynamo")
ZARR = ("trainers.zarr_saving", "megatron.core.dist_checkpointing.strategies.zarr")
NO_PACKAGE = ("torch",)
DEEPSPEED = ("deepspeed.checkpoint.ds_to_universal", "trainers.deepspeed_training")

# The modules that each program of programs/ imports, with any arguments.
IMPORTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "async_saving",
            "empty_state",
            "exact_resume",
            "explore_megatron",
            "fsdp2_rows",
            "expert_rng",
            "gpt_resume",
            "hybrid_old_step",
            "hybrid_reload",
            "layer_wise",
            "layer_wise_torch",
            "megatron_fsdp_saving",
            "megatron_healthy",
            "megatron_saving",
            "mixed_groups",
            "param_remainders",
            "padded_saving",
            "param_groups",
            "proof",
            "ranks_that_differ",
            "run_proof",
            "shifted_saving",
        ),
        MEGATRON,
    ),
    "bridge_finetune": BRIDGE,
    "strip_shapes": CORE,
    **dict.fromkeys(("damaged_zero", "dcp_loading", "dcp_saving", "load_distcp"), NO_PACKAGE),
    **dict.fromkeys(("zarr_race",), ZARR),
    **dict.fromkeys(("convert", "foreign_files", "own_files", "same_universal"), DEEPSPEED),
    **dict.fromkeys(("autoep_training", "experts", "stage_settings", "universal_loading"), DEEPSPEED),
    **dict.fromkeys(("explore_deepspeed", "zero3_slices", "zero_resuming", "zero_training"), DEEPSPEED),
    "write_parallel_checkpoint": DEEPSPEED,
}

# The torch modules that all of these import, the same for all trees: at least half of their import time. Not
# torch.distributed.checkpoint, which the hook edits.
TORCH = ("torch", "torch._inductor.compile_fx", "torch.testing")
WITH_TORCH = (MEGATRON, BRIDGE, ZARR, DEEPSPEED, CORE, NO_PACKAGE)

# Variables that programs read at run time, and no import reads.
PER_RUN = ("MASTER_PORT", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")

# Maximum number of processes that one test process keeps.
AT_ONCE = 30
# Whether programs run as forks; `pytest --no-forks` runs each in its own interpreter.
forks = True

_lifelines: OrderedDict[Path, IO[bytes]] = OrderedDict()  # by a process's path, the pipe whose closing ends it


class NotStarted(RuntimeError):
    """A process could not import the modules."""


def connect(environment: Mapping[str, str], modules: Sequence[str]) -> tuple[socket.socket, Path]:
    """Connect to the test run's process with these imports; start it if it does not run.

    Files at its path, ending in .out and .err, have the output of the imports.

    Raises:
        NotStarted: an import failed, or left a thread running; the message has its output.
    """
    what = json.dumps([sys.executable, list(modules), sorted(environment.items())])
    path = shared.folder() / f"zygote-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = _greeted(path)
        if connection is None:
            _start(path, environment, modules)
            connection = _greeted(path)
    if connection is None:
        raise NotStarted(f"{' '.join(modules)} could not be imported:\n{''.join(_printed(path))}")
    if path in _lifelines:
        _lifelines.move_to_end(path)
    return connection, path


def _greeted(path: Path) -> socket.socket | None:
    """A connection to the process that serves at this path; None without one."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"{path}.socket")
        if connection.recv(100):
            return connection
    except (FileNotFoundError, ConnectionError):
        pass
    connection.close()
    return None


def _start(path: Path, environment: Mapping[str, str], modules: Sequence[str]) -> None:
    """Start a process in an environment; if it imports torch, as a fork of a process that already did."""
    base = connect(environment_of_base(environment), TORCH)[0] if modules in WITH_TORCH else None
    while len(_lifelines) >= AT_ONCE:
        _lifelines.popitem(last=False)[1].close()
    Path(f"{path}.socket").unlink(missing_ok=True)
    reading, writing = os.pipe()
    _lifelines[path] = os.fdopen(writing, "wb")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening,
        open(reading, "rb") as ends,
        open(f"{path}.out", "wb") as out,
        open(f"{path}.err", "wb") as err,
    ):
        listening.bind(f"{path}.socket")
        listening.listen()
        if base is None:
            command = [sys.executable, str(ZYGOTE), str(listening.fileno()), *modules]
            files: dict[str, Any] = {"stdin": ends, "stdout": out, "stderr": err, "pass_fds": [listening.fileno()]}
            subprocess.Popen(command, env=environment, start_new_session=True, **files).wait()
        else:
            request = {"modules": list(modules), "environment": dict(environment)}
            numbers = [file.fileno() for file in (ends, out, err, listening)]
            with base:
                socket.send_fds(base, [json.dumps(request).encode()], numbers)
                base.recv(100)  # until it has received them


def environment_of_base(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that imports only torch: no hook, and only the folders that torch needs."""
    kept = {name: value for name, value in environment.items() if not name.startswith("CKPT_PATCHES")}
    folders = [folder for folder in environment["PYTHONPATH"].split(os.pathsep) if _is_for_torch(Path(folder))]
    return {**kept, "CKPT_PATCHES": "off", "PYTHONPATH": os.pathsep.join(folders)}


def _is_for_torch(folder: Path) -> bool:
    return any((folder / name).is_dir() for name in ("numpy", "torch", "triton"))


def run(
    program: Path, arguments: Sequence[str], *, environment: Mapping[str, str], timeout: float, imports: Sequence[str]
) -> "subprocess.CompletedProcess[str]":
    """Run a program like subprocess.run, but as a fork of a process that did these `imports`, if any.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds, and was killed.
        RuntimeError: the process that waited for it was killed.
    """
    argv = [str(program), *arguments]
    if imports and forks:
        lasting = {name: value for name, value in environment.items() if name not in PER_RUN}
        with contextlib.suppress(NotStarted):  # then the program's own imports report the error
            connection, path = connect(lasting, imports)
            with connection:
                return _run(connection, argv, {name: environment.get(name) for name in PER_RUN}, timeout, path)
    return subprocess.run([sys.executable, *argv], env=environment, text=True, capture_output=True, timeout=timeout)


def _run(
    connection: socket.socket, argv: list[str], variables: Mapping[str, str | None], timeout: float, path: Path
) -> "subprocess.CompletedProcess[str]":
    """Run a program with these variables set (None: not set); its output begins with that of the imports."""
    request = json.dumps({"argv": argv, "cwd": os.getcwd(), "environment": variables})
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        socket.send_fds(connection, [request.encode()], [out.fileno(), err.fileno()])
        connection.settimeout(timeout)
        try:
            status = connection.recv(100)
        except TimeoutError:
            raise subprocess.TimeoutExpired(argv, timeout, _text(out), _text(err)) from None
        if not status:
            raise RuntimeError(f"the process that waited for {argv[0]} is gone: {_text(err)}")
        printed = [before + _text(file) for before, file in zip(_printed(path), (out, err), strict=True)]
    return subprocess.CompletedProcess([sys.executable, *argv], int(status), *printed)


def _printed(path: Path) -> list[str]:
    """The standard output and error of a process's imports."""
    return [Path(f"{path}.{name}").read_text(errors="replace") for name in ("out", "err")]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


@atexit.register
def end_all() -> None:
    """End the processes that this one started; programs of other processes continue."""
    while _lifelines:
        _lifelines.popitem()[1].close()
