"""Checkpoints that the tests of the audit share: a real training writes each configuration once a session."""

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upstream import run_json, tree
from zero_checkpoints import session_folder

Ranges = dict[str, list[tuple[int, int]]]


@dataclass(frozen=True)
class Configuration:
    """How a run is set up; see `tests/programs/megatron_saving.py`."""

    version: str = "0.14.0"
    ranks: int = 4
    tp: int = 1
    dtype: str = "bf16"
    iterations: str = "0,1,3"
    races: int = 0
    seed: int = 0
    format: str = "fully_sharded_model_space"
    backend: str = "zarr"

    def __str__(self) -> str:
        return f"{self.version}-dp{self.ranks // self.tp}-tp{self.tp}-{self.dtype}-seed{self.seed}"


@dataclass(frozen=True)
class Written:
    """What a run wrote."""

    whole: list[Path]
    raced: dict[Path, dict[str, Ranges]]  # "slices" and "different", as ranges by array


@functools.cache
def written(configuration: Configuration) -> Written:
    out = Path(tempfile.mkdtemp(dir=session_folder())) / "run"
    options = [
        option
        for name, value in vars(configuration).items()
        if name != "version"
        for option in (f"--{name}", str(value))
    ]
    lost: dict[str, Any] = run_json("megatron_saving", out, *options, tree=tree("megatron-core", configuration.version))
    raced = {
        out / race: {
            what: {array: [(begin, end) for begin, end in ranges] for array, ranges in by_array.items()}
            for what, by_array in found.items()
        }
        for race, found in lost.items()
    }
    return Written(sorted(out.glob("iter_*")), raced)
