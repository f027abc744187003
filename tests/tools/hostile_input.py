"""Change small checkpoints of every format as no upstream package would, and run commands on them: each ends in a line.

    python tests/tools/hostile_input.py mutations --seed 0 --count 5000 [--only 'stage*']
    python tests/tools/hostile_input.py values    [--only 'stage*']

`mutations` changes bytes, and `values` puts each of many values into each place of each pickle. Every command runs in a
process of its own. It must end within a time and a memory limit, without a traceback, without an import or a write that
an unchanged checkpoint does not need. The exit status is 1 if one did not.
"""

import argparse
import contextlib
import fnmatch
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

sys.dont_write_bytecode = True  # the files of caches would count as writes
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [*map(str, (TESTS, TESTS / "programs", TESTS / "tools" / "programs", TESTS.parent))]

import numpy as np  # noqa: E402
import torch  # noqa: E402

import plain_runs  # noqa: E402
import test_audit_trainer  # noqa: E402
from ckpt_patches.cli.command_line import main as command  # noqa: E402
from dcp_checkpoints import saved_by_ranks  # noqa: E402
from every_checkpoint import EVERY  # noqa: E402
from upstream import once  # noqa: E402

SECONDS, MEMORY, RESIDENT = 20, 3 << 30, 600 << 20
LONGEST_JSON = 4 << 20  # characters
KINDS = (
    "0.14, zarr",
    "0.14, torch_dist",
    "0.14, torch",
    "0.19, fully_reshardable",
    "stage 2",
    "stage 3",
    "experts, stage 1",
    "universal of stage 2",
)
TRACEBACK = re.compile(r"Traceback|a defect of the audit|please report")
ALLOWED = (
    *("ckpt_patches", "encodings", "multiprocessing", "numpy", "torch"),
    *("_strptime", "unicodedata", "stringprep", "deepspeed_patches"),
)


class Outcome(NamedTuple):
    """How a command ended."""

    status: int  # of `wait`
    said: str
    events: tuple[str, ...]  # imports and writes
    seconds: float
    resident: int  # bytes, at most


def source(name: str) -> Path:
    makers: dict[str, Callable[[], Path]] = {
        "verl": lambda: saved_by_ranks(2) / "fsdp2",
        "dcp": lambda: once("hostile-dcp", lambda out: plain_runs.save(out, 3)) / "step-3",
        "trainer": lambda: once("hostile-trainer", lambda out: test_audit_trainer.run(out)) / "checkpoint-4",
    }
    return EVERY[name].path if name in EVERY else makers[name]()


# Running


def run(arguments: list[str], writable: Path) -> Outcome:
    """Run a command in a forked process, with limits, and note what it imports and writes."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as events:
        began = time.monotonic()
        process = os.fork()
        if not process:
            _in_child(arguments, writable, output.fileno(), events.fileno())
        status, usage = _wait(process)
        output.seek(0)
        events.seek(0)
        said = output.read(1 << 20).decode(errors="replace")
        seen = tuple(dict.fromkeys(events.read(1 << 16).decode(errors="replace").splitlines()))
        return Outcome(status, said, seen, time.monotonic() - began, usage.ru_maxrss << 10)


def _in_child(arguments: list[str], writable: Path, output: int, events: int) -> None:
    status = 97
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8", write_through=True)
        sys.stderr = sys.stdout
        sys.addaudithook(lambda event, values: _note(event, values, str(writable), events))
        status = command(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 98
    except BaseException:
        traceback.print_exc(file=sys.stdout)
    finally:
        os._exit(status)


def _note(event: str, values: tuple[Any, ...], writable: str, into: int) -> None:
    """An audit hook: writes what a reader of checkpoints never does."""
    said = ""
    if event == "import" and values[0] not in sys.modules and not values[0].startswith(ALLOWED):
        said = "import" if values[0] in sys.stdlib_module_names else f"import {values[0]}"
        said = said if said != "import" else ""  # Python's own modules come on demand
    elif event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect", "ctypes.dlopen"):
        said = f"{event} {values!r:.200}"
    elif event == "open" and isinstance(values[2], int) and values[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        path = "" if isinstance(values[0], int) else os.path.realpath(os.fsdecode(values[0]))
        said = f"open for writing {path}" if path and not path.startswith((writable, "/dev/")) else ""
    elif event in ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate"):
        path = "" if not isinstance(values[0], (str, bytes, os.PathLike)) else os.path.realpath(os.fsdecode(values[0]))
        is_below_a_descriptor = isinstance(values[-1], int) and values[-1] >= 0
        said = f"{event} {path}" if path and not is_below_a_descriptor and not path.startswith(writable) else ""
    if said:
        os.write(into, said.encode("utf-8", "backslashreplace") + b"\n")


def _wait(process: int) -> tuple[int, resource.struct_rusage]:
    """The status and usage of a process, which is ended after some time."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        os.kill(process, signal.SIGKILL)

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        _, status, usage = os.wait4(process, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return status, usage


def defects(outcome: Outcome) -> list[str]:
    found = [f"{event}" for event in outcome.events]
    if os.WIFSIGNALED(outcome.status):
        number = os.WTERMSIG(outcome.status)
        found.append(f"no end in {SECONDS} s" if number == signal.SIGKILL else f"ended by signal {number}")
    elif os.WEXITSTATUS(outcome.status) not in (0, 1, 2, 3):
        found.append(f"exit status {os.WEXITSTATUS(outcome.status)}")
    if outcome.resident > RESIDENT:
        found.append(f"{outcome.resident >> 20} MiB")
    if match := TRACEBACK.search(outcome.said):
        found.append(outcome.said[max(match.start() - 200, 0) :][-700:])
    if "\x1b" in outcome.said:
        found.append("a raw escape in the output")
    if not outcome.said.strip():
        found.append("nothing was said")
    return found


def commands(name: str, folder: Path, out: Path) -> Iterator[list[str]]:
    yield ["audit", "--workers", "1", str(folder)]
    yield ["repair", "--workers", "1", str(folder), "--output", str(out / "repaired")]
    if "stage" in name and "universal" not in name:
        yield ["to-universal", "--workers", "1", str(folder), "--output", str(out / "universal")]
    if name.startswith("0."):
        yield ["migrate", "--workers", "1", str(folder), "--output", str(out / "migrated")]
    if name not in ("trainer", "verl"):
        yield ["fingerprint", str(folder)]


# Mutations

NUMBERS = (b"\xff" * 8, b"\xff\xff\xff\x7f", b"\x00" * 8, b"\x00\x00\x00\x80", b"\x7f", b"-1", b"9" * 9)
OPCODES = b"()].0NRabceghijloqrstuX}\x80\x81\x82\x85\x86\x87\x88\x8a\x8b"


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def mutated(data: bytes, choose: random.Random) -> bytes:
    """Bytes changed, removed, doubled, or moved; or another pickle opcode; or a number that is large."""
    at, to = choose.randrange(len(data)), choose.randrange(len(data))
    length = min(choose.choice((1, 2, 4, 8, 64, 512)), len(data) - at)
    part, value = data[at : at + length], choose.choice(NUMBERS)
    changed = bytearray(data)
    for _ in range(choose.randrange(1, 5)):
        changed[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    return choose.choice(
        (
            data[:at],
            data[:at] + data[at + length :],
            data[:at] + part * choose.choice((2, 3, 100)) + data[at + length :],
            data[:to] + part + data[to + length :],
            data[:at] + value + data[at + len(value) :],
            data[:at] + bytes([choose.choice(OPCODES)]) + data[at + 1 :],
            bytes(changed),
            bytes(changed),
        )
    )


def in_pickle(path: Path, choose: random.Random) -> bool:
    """Change the pickle of a torch.save file and write the zip anew, so that its checksums are right."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as file:
        records = {entry.filename: file.read(entry) for entry in file.infolist()}
    names = [name for name in records if name.endswith("data.pkl")]
    if not names:
        return False
    records[names[0]] = mutated(records[names[0]], choose)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for name, data in records.items():
            file.writestr(name, data)
    return True


def mutations(name: str, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[Path], bool]]]:
    for seed in range(options.seed, options.seed + options.count):

        def change(folder: Path, seed: int = seed) -> bool:
            choose = random.Random(f"{name} {seed}")
            path = choose.choice(files_of(folder))
            if choose.random() < 0.6 and in_pickle(path, choose):
                return True
            path.write_bytes(mutated(path.read_bytes(), choose))
            return True

        yield f"seed {seed}", change


# Values


class Unknown:
    """A class that no reader knows."""


def nested(make: Callable[[Any], Any], depth: int) -> Any:
    value: Any = make(0)
    for _ in range(depth):
        value = make(value)
    return value


def doubled(depth: int) -> tuple[Any, ...]:
    value: tuple[Any, ...] = ()
    for _ in range(depth):
        value = (value, value)
    return value


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


DTYPES = [getattr(torch, name) for name in ("bool", "uint8", "int64", "float16", "bfloat16", "float64", "complex64")]
VALUES: dict[str, Any] = {
    **{repr(value): value for value in (None, True, False, 0, 1, -1, 2, 2**31, 2**63, -(2**63), 2**200, 10**400)},
    **{repr(value): value for value in (0.0, -0.0, 0.5, 1e308, -1e308, float("nan"), float("inf"), -float("inf"), 1j)},
    **{repr(text): text for text in ("", "a", "\x00", "\x1b[2K", "\u202e", "\ud800", "/", "../..")},
    "a long text": "x" * 10**6,
    **{f"bytes {n}": data for n, data in enumerate((b"", b"\xff", b"x" * 10**6, bytearray(b"ab")))},
    **{repr(value): value for value in ((), (1,), (None,), [], [1], [None], [[]], set(), {1}, frozenset())},
    **{repr(value): value for value in ({}, {1: 2}, {"": None}, {None: 1})},
    **{f"a list of {n}": [0] * n for n in (10**3, 10**5)},
    **{f"a dict of {n}": dict.fromkeys(range(n)) for n in (10**3, 10**5)},
    "lists in each other": nested(lambda value: [value], 60),
    "dicts in each other": nested(lambda value: {"a": value}, 60),
    "tuples in each other": nested(lambda value: (value,), 60),
    **{f"doubled {n}": doubled(n) for n in (10, 60)},
    "a tuple as a key": {(1, ("a", 2)): 1},
    "a number as a key": {2**80: 1, 1.5: 2},
    "itself": itself(),
    "range": range(10**9),
    "slice": slice(1, 2),
    "a class": Unknown,
    "an object": Unknown(),
    "a namespace": Namespace(a=1),
    "a function": len,
    "an exception": ValueError("a"),
    "a path": Path("/etc/passwd"),
    "ordered": OrderedDict(a=1),
    "counted": Counter("aab"),
    "a dtype": torch.float32,
    "a size": torch.Size([2, 3]),
    "a size of nothing": torch.Size([]),
    "a device": torch.device("cpu"),
    "a generator": np.random.get_state(),
    "a number of NumPy": np.float64(1.5),
    "an array": np.arange(4),
    "an array of objects": np.array([None, {}], dtype=object),
    **{f"a tensor of {dtype}": torch.ones(3).to(dtype) for dtype in DTYPES},
    "a scalar tensor": torch.tensor(3.0),
    "a tensor of nothing": torch.empty(0),
    "an empty matrix": torch.empty(0, 5),
    "a matrix": torch.ones(2, 3),
    "a view": torch.ones(4, 4).t(),
    "an expanded tensor": torch.ones(1).expand(1000),
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "NaN in a tensor": torch.full((3,), float("nan")),
    "a sparse tensor": torch.eye(3).to_sparse(),
    "a quantized tensor": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "a meta tensor": torch.empty(10**12, device="meta"),
    "a nested tensor": [torch.ones(2), {"a": torch.ones(2)}],
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in dicts and lists, inner ones too; of equal entries of long ones, the first few."""
    if isinstance(value, dict):
        for key in list(value)[:40]:
            yield (*path, key)
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for number in range(min(len(value), 3)):
            yield (*path, number)
            yield from places(value[number], (*path, number))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    at = value
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return value


def of_pickle(path: Path) -> tuple[Any, Callable[[Any], None]] | None:
    """The value of a file of torch or pickle, and how to write another one; None if it is neither."""
    try:
        if zipfile.is_zipfile(path):
            return torch.load(path, weights_only=False), lambda value: torch.save(value, path)
        if path.name == ".metadata":
            found = pickle.loads(path.read_bytes())
            return dict(vars(found)), lambda value: _pickled(found, value, path)
        if path.suffix == ".json" or path.name in (".zarray", ".zattrs"):
            return json.loads(path.read_text()), lambda value: _as_json(value, path)
    except Exception:
        return None
    return None


def _pickled(found: Any, value: dict[str, Any], path: Path) -> None:
    for name, own in value.items():
        object.__setattr__(found, name, own)
    path.write_bytes(pickle.dumps(found))


def _as_json(value: Any, path: Path) -> None:
    """Write a value, unless its text is too long: that of tuples in each other doubles with each of them."""
    parts, length = [], 0
    for part in json.JSONEncoder().iterencode(value):
        parts.append(part)
        length += len(part)
        if length > LONGEST_JSON:
            raise ValueError("too long")
    path.write_text("".join(parts))


def values(name: str, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[Path], bool]]]:
    """Every value at `--count` places of each file, chosen by the seed, or at all of them."""
    whole = source(name)
    for path in files_of(whole):
        relative = path.relative_to(whole)
        held = of_pickle(path)
        every = [] if held is None else list(places(held[0]))
        chosen = random.Random(f"{options.seed} {relative}").sample(every, min(options.count, len(every)))
        for place in chosen:
            for what, new in VALUES.items():

                def change(folder: Path, relative: Path = relative, place: Any = place, new: Any = new) -> bool:
                    own = of_pickle(folder / relative)
                    assert own is not None
                    try:
                        own[1](put(own[0], place, new))
                    except Exception:  # torch or JSON cannot write it
                        return False
                    return True

                yield f"{relative} {place!r}: {what}", change


KINDS_OF_CHANGE = {"mutations": mutations, "values": values}


def run_all(options: argparse.Namespace) -> int:
    bad = 0
    for name in (*KINDS, "dcp", "trainer", "verl"):
        if not fnmatch.fnmatch(name, options.only):
            continue
        whole = source(name)
        ended: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as temporary:
            for number, (what, change) in enumerate(KINDS_OF_CHANGE[options.how](name, options)):
                folder, out = Path(temporary, "checkpoint"), Path(temporary, "out")
                shutil.copytree(whole, folder)
                out.mkdir()
                if change(folder):
                    audit, *others = commands(name, folder, out)
                    for arguments in [audit, others[number // 10 % len(others)]] if number % 10 == 0 else [audit]:
                        outcome = run(arguments, out)
                        ended[arguments[0]] += 1
                        for found in defects(outcome):
                            bad += 1
                            print(f"{name}, {what}, {arguments[0]}: {found}", flush=True)
                for path in (folder, out):
                    shutil.rmtree(path)
        counts = ", ".join(f"{count} {what}" for what, count in ended.items())
        print(f"{name}: {counts}; {bad} defects so far", flush=True)
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("how", choices=KINDS_OF_CHANGE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--only", default="*", help="a pattern of formats")
    options = parser.parse_args()
    with contextlib.suppress(AttributeError):
        sys.set_int_max_str_digits(0)  # of this program, to write large numbers
    return run_all(options)


if __name__ == "__main__":
    sys.exit(main())
