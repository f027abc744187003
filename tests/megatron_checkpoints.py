"""Checkpoints that the audit's tests share; a real training run writes each configuration once per session."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upstream import once, run_json, tree

Ranges = dict[str, list[tuple[int, int]]]


@dataclass(frozen=True)
class Configuration:
    """The setup of a run; see `tests/programs/megatron_saving.py`."""

    version: str = "0.14.0"
    ranks: int = 4
    tp: int = 1
    dtype: str = "bf16"
    iterations: str = "0,1,3"
    races: int = 0
    seed: int = 0
    format: str = "fully_sharded_model_space"
    backend: str = "zarr"
    reload: str = "no"
    pp: int = 1
    memory: str = "any"  # padding: "zeros", or the memory's old content
    recorded: bool = False  # with fingerprints

    def __str__(self) -> str:
        parts = (
            self.version,
            self.format,
            f"dp{self.ranks // self.tp}",
            f"tp{self.tp}" + (f"-pp{self.pp}" if self.pp > 1 else ""),
            self.dtype,
            self.backend,
            self.reload + ("-zeros" if self.memory == "zeros" else "") + ("-recorded" if self.recorded else ""),
        )
        return "-".join((*parts, f"seed{self.seed}"))

    def options(self) -> list[str]:
        """The program's options."""
        return [f"--{name}={value}" for name, value in vars(self).items() if name not in ("version", "recorded")]


# The default tests' runs: two data-parallel ranks; four, with two tensor-parallel ranks; fp16 with skipped steps.
ZARR = Configuration(ranks=2, races=10)
ZARR_TP = Configuration(ranks=8, tp=2, races=20)
ZARR_FP16 = Configuration(ranks=4, dtype="fp16", iterations="0,3,30", races=10)


@dataclass(frozen=True)
class Written:
    """The checkpoints that a run wrote."""

    whole: list[Path]
    raced: dict[Path, dict[str, Ranges]]  # "slices" and "different", as ranges by array


@functools.cache
def written(configuration: Configuration) -> Written:
    """The checkpoints of a run, shared by parallel test processes."""

    def write(out: Path) -> None:
        release = tree("megatron-core", configuration.version)
        on: dict[str, Any] = {"tree": release, "delivery": "none"}
        if configuration.recorded:
            on |= {"delivery": "hook", "env": {"CKPT_PATCHES_FINGERPRINT": "1"}}
        elif configuration.backend == "zarr":  # else its ranks may race by themselves
            on |= {"delivery": "hook", "fixes": ["zarr_create_synchronizer"]}
        lost = run_json("megatron_saving", out, *configuration.options(), **on)
        (out / "lost.json").write_text(json.dumps(lost))

    name = f"megatron-{configuration}-{configuration.iterations}-{configuration.races}"
    out = once(name, write)
    raced = {
        out / race: {
            what: {array: [(begin, end) for begin, end in ranges] for array, ranges in by_array.items()}
            for what, by_array in found.items()
        }
        for race, found in json.loads((out / "lost.json").read_text()).items()
    }
    return Written(sorted(out.glob("iter_*")), raced)
