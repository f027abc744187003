"""torch_dist_write_item: torch_dist saves of megatron-core 0.12 work with a current torch."""

import re
from pathlib import Path

import torch

from trainers.lazy import mt
from upstream import proof

test_the_save_fails, test_what_was_saved_is_loaded = proof(
    __file__, re.compile(r"^RuntimeError: (Worker failure: _write_item\(\)|Incomplete worker results)")
)


# What the ranks run


def save_and_load(rank: int, checkpoint: Path) -> str:
    from megatron.core import dist_checkpointing

    saved = torch.arange(10.0)
    checkpoint.mkdir()
    dist_checkpointing.save({**mt.one_weight(saved), "iteration": 5}, str(checkpoint), ("torch_dist", 1))
    loaded = dist_checkpointing.load(mt.one_weight(torch.empty(10)), str(checkpoint))
    return "" if torch.equal(loaded["weight"], saved) else "other values than were saved"


def bug(folder: Path) -> str:
    return str(mt.results(save_and_load, 1, folder / "checkpoint")[0])
