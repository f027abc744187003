"""Give DeepSpeed files with objects that it does not write itself; print the results, as JSON.

    foreign_files.py CHECKPOINT FOLDER

CHECKPOINT comes from a training; a changed copy of it, and other files, go into FOLDER. `ran` is whether code inside a
file was run.
"""

import argparse
import builtins
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from deepspeed.checkpoint import SubparamShape
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from convert import convert
from program_arguments import parsed


class Settings:
    """A user's class."""

    depth = 3


class Attack:
    """An object that runs code when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return builtins.exec, (f"open({str(self.marker)!r}, 'w').close()",)


class RawMemory:
    """An object array whose addresses come from the file, if NumPy's arrays are allowed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return numpy.ndarray, ((1,), "O", b"A" * 8)


# Includes the allowed classes that no test's training writes.
PLAIN = {
    "sub_param_shape": SubparamShape(patterns=["query"], shape=((2, 1), 3), partition_dim=0),
    "args": argparse.Namespace(params_dtype=torch.half, lr=1e-4, data_path=["a", "b"], seed=None),
    "random_rng_state": random.getstate(),
    "torch_rng_state": torch.get_rng_state(),
}
# Megatron-DeepSpeed saves this, and DeepSpeed itself with curriculum learning.
NUMPY_STATE = {"np_rng_state": numpy.random.get_state()}
NUMPY_CLASSES = [numpy.empty(0).__reduce__()[0], numpy.ndarray, numpy.dtype, type(numpy.dtype("uint32"))]


def said(do: Callable[[], object]) -> str:
    """The error, or ""."""
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def attacked_copy(checkpoint: Path, to: Path, marker: Path) -> Path:
    """Copy a checkpoint, with an attack in the first rank's file; return that file."""
    shutil.copytree(checkpoint, to)
    path = min(to.glob("*/*optim_states.pt"))
    torch.save({**torch.load(path, weights_only=False), "x": Attack(marker)}, path)
    return path


def read(rank_file: Path) -> dict[str, str]:
    """The result of each reader for a checkpoint."""
    tag = rank_file.parent
    return {
        "engine": said(lambda: TorchCheckpointEngine().load(str(rank_file), map_location="cpu")),
        "converter": convert(tag, tag.parent / "universal", 1),
        "fp32 weights": said(lambda: get_fp32_state_dict_from_zero_checkpoint(str(tag.parent), tag=tag.name)),
    }


def main() -> None:
    args = parsed({"checkpoint": Path, "folder": Path})
    engine, path, marker = TorchCheckpointEngine(), str(args.folder / "client.pt"), args.folder / "ran"

    def load(saved: object) -> str:
        torch.save(saved, path)
        return said(lambda: engine.load(path))

    found: dict[str, Any] = {
        "plain": load(PLAIN),
        "unknown classes": load({"settings": Settings(), "path": Path("x"), **PLAIN}),
        "raw memory": load(RawMemory()),
        "numpy state": load(NUMPY_STATE),
    }
    torch.serialization.add_safe_globals([Settings, type(Path("x")), argparse.Namespace, *NUMPY_CLASSES])
    allowed = set(torch.serialization.get_safe_globals())
    found["allowed by the user"] = load({"settings": Settings(), "path": Path("x"), **PLAIN, **NUMPY_STATE})
    found["changed"] = len(set(torch.serialization.get_safe_globals()) ^ allowed)
    Path(path).write_bytes(b"no checkpoint")
    found["damaged"] = said(lambda: engine.load(path))

    found["attack"] = read(attacked_copy(args.checkpoint, args.folder / "attack", marker))
    found["ran"] = marker.exists()
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
