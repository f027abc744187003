"""Count what a rank does in a save or a load: messages, bytes, files opened and created, and metadata operations.

Only files that Python opens under one folder count as opened; files that torch opens in C++ do not. A message is a
collective, or a sent tensor, in which this rank takes part; its bytes are those of this rank's own tensors.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

METADATA = {
    f"os.{name}"
    for name in ("mkdir", "rename", "remove", "rmdir", "link", "symlink", "truncate", "chmod", "listdir", "scandir")
}
# By collective, the index of the argument that this rank sends; 0 for the collectives that are not listed.
SENT = {"allgather_": 1, "_allgather_base_": 1, "allgather_into_tensor_coalesced_": 1, "gather_": 1, "scatter_": 1}
SENT |= {"reduce_scatter_": 1, "_reduce_scatter_base_": 1, "alltoall_": 1, "alltoall_base_": 1}
NO_DATA = ("barrier", "recv_", "recv_any_source_", "monitored_barrier_")

_counting: list[tuple[str, Counter[str]]] = []  # at most one entry: the folder and its counts


class Messages(TorchDispatchMode):
    """Counts everything that goes through the dispatcher to a process group, from any caller."""

    def __init__(self, counts: "Counter[str]") -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            self._counts["messages"] += not name.startswith("recv")  # already counted where it is sent
            self._counts["bytes"] += 0 if name in NO_DATA else _nbytes(args[SENT.get(name, 0)])
        return func(*args, **(kwargs or {}))


def _nbytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return int(tensors.nbytes)
    return sum(map(_nbytes, tensors)) if isinstance(tensors, Iterable) else 0


def _note(event: str, args: tuple[Any, ...]) -> None:
    if not _counting or (event not in METADATA and event != "open"):
        return
    folder, counts = _counting[0]
    path = os.fspath(args[0]) if isinstance(args[0], str | bytes | os.PathLike) else args[0]
    if isinstance(path, int):
        counts["metadata"] += event == "os.truncate"
    elif str(path).startswith(folder):
        if event == "open":
            counts["opened"] += 1
            counts["created"] += bool(args[2] & os.O_CREAT) and not os.path.exists(path)
        else:
            counts["metadata"] += 1


@contextmanager
def counted(folder: Path) -> Iterator["Counter[str]"]:
    """The counts of this process within the block; a fork of it counts nothing."""
    if not getattr(sys, "_counts_are_noted", False):
        sys.addaudithook(_note)  # cannot be removed again
        vars(sys)["_counts_are_noted"] = True
    counts: Counter[str] = Counter(dict.fromkeys(("messages", "bytes", "opened", "created", "metadata"), 0))
    _counting.append((str(folder), counts))
    before = _moved()
    try:
        with Messages(counts):
            yield counts
    finally:
        _counting.clear()
        counts.update({name: number - before[name] for name, number in _moved().items()})


def _moved() -> dict[str, int]:
    """The bytes that this process has read and written so far."""
    counted = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read": int(counted["rchar"]), "written": int(counted["wchar"])}
