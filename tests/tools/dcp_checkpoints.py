"""Checkpoints that torch alone writes, once per test run; see programs/dcp_saving.py."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from upstream import newest, once, run, tree

# How each case differs from training with FSDP2 and AdamW, saved as in torch's documentation.
CASES: dict[str, Mapping[str, Any]] = {
    "fsdp": {},
    "step-9": {"steps": 9},
    "hsdp": {"mesh": "hsdp", "save": "flat"},
    "one_rank": {"mesh": "none"},
    "raw": {"save": "raw"},
    "step-1000": {"save": "raw"},
    "fsdp1_raw": {"mesh": "fsdp1", "save": "raw"},
    "fsdp1_flat_raw": {"mesh": "fsdp1_flat", "save": "raw"},
    "fsdp1_local": {"mesh": "fsdp1_flat", "save": "local"},
    "weights": {"save": "weights"},
    "folders": {"save": "folders"},
    "fresh": {"steps": 0},
    "frozen": {"options": {"frozen": True}},
    "unused": {"options": {"unused": True}},
    "strided": {"options": {"strided": True}, "mesh": "ddp"},
    "sgd": {"optimizer": "SGD"},
    "adafactor": {"optimizer": "Adafactor", "mesh": "none"},
}


# One file per rank and no index, as verl saves.
OF_RANKS: dict[str, Mapping[str, Any]] = {
    "fsdp2": {},
    "fsdp2_bf16": {"dtype": "bfloat16"},
    "fsdp2_groups": {"options": {"groups": True}},
    "fsdp2_fresh": {"steps": 0},
    "fsdp1": {"mesh": "fsdp1_flat"},
    "fsdp1_original": {"mesh": "fsdp1"},
    "global_step_40/actor": {},
}
OF_FOUR_RANKS: dict[str, Mapping[str, Any]] = {**OF_RANKS, "hsdp": {"mesh": "hsdp"}, "fsdp_tp": {"mesh": "fsdp_tp"}}


def saved() -> Path:
    """A folder with a checkpoint of each case; read-only."""
    return once("dcp", partial(_write, cases=CASES))


def saved_by_ranks(ranks: int) -> Path:
    """A folder with checkpoints of one file per rank, for two or four ranks."""
    cases = {name: {**case, "save": "ranks"} for name, case in (OF_FOUR_RANKS if ranks == 4 else OF_RANKS).items()}
    return once(f"ranks-{ranks}", partial(_write, cases=cases, ranks=ranks))


def _write(folder: Path, cases: Mapping[str, Mapping[str, Any]], ranks: int = 4) -> None:
    folder.mkdir()
    file = folder / "cases.json"
    file.write_text(json.dumps([{"name": name, **case} for name, case in cases.items()]))
    run("dcp_saving", folder, file, str(ranks), tree=tree("deepspeed", newest("deepspeed")))
