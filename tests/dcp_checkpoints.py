"""Checkpoints that torch alone has written, on four ranks, once a run of the tests; see programs/dcp_saving.py."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import shared
from upstream import newest, run, tree

# What each differs in from a training with FSDP2 and AdamW that is saved as torch's documentation says.
CASES: dict[str, Mapping[str, Any]] = {
    "fsdp": {},
    "step-9": {"steps": 9},
    "hsdp": {"mesh": "hsdp", "save": "flat"},
    "fsdp_tp": {"mesh": "fsdp_tp"},
    "tp": {"mesh": "tp"},
    "ddp": {"mesh": "ddp"},
    "one_rank": {"mesh": "none"},
    "bf16": {"dtype": "bfloat16"},
    "raw": {"save": "raw"},
    "step-1000": {"save": "raw"},
    "weights": {"save": "weights"},
    "folders": {"save": "folders"},
    "async": {"save": "async"},
    "fresh": {"steps": 0},
    "first": {"steps": 1},
    "groups": {"options": {"groups": True}, "save": "flat"},
    "zeros": {"options": {"zeros": True}},
    "tied": {"options": {"tied": True}},
    "frozen": {"options": {"frozen": True}},
    "unused": {"options": {"unused": True}},
    "strided": {"options": {"strided": True}, "mesh": "ddp"},
    "sgd": {"optimizer": "SGD"},
    "adagrad": {"optimizer": "Adagrad"},
    "adafactor": {"optimizer": "Adafactor", "mesh": "none"},
    # Damage is done to what is saved: a parameter, its state, the elements, and their value.
    "nan_weight": {"damage": ("norm.weight", "weight", 3, 4, "nan")},
    "nan_moment": {"damage": ("head.weight", "exp_avg", 100, 101, "nan")},
    "lost_moment": {"damage": ("layers.1.up.weight", "exp_avg", 288, 576, 0)},
    "lost_square": {"damage": ("layers.1.up.weight", "exp_avg_sq", 288, 576, 0)},
    "lost_weight": {"damage": ("layers.1.up.weight", "weight", 288, 576, 0)},
    "negative": {"damage": ("layers.0.down.weight", "exp_avg_sq", 5, 6, -1)},
}


def saved() -> Path:
    """A folder with one of each; nobody changes them."""

    def write(folder: Path) -> None:
        folder.mkdir()
        cases = folder / "cases.json"
        cases.write_text(json.dumps([{"name": name, **case} for name, case in CASES.items()]))
        run("dcp_saving", folder, cases, tree=tree("deepspeed", newest("deepspeed")))

    return shared.once("dcp", write)
