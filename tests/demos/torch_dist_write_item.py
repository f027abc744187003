"""save and load torch_dist with a current torch"""

from pathlib import Path

import torch

from trainers import megatron_training as mt


def save_and_load(rank: int, checkpoint: Path) -> str:
    from megatron.core import dist_checkpointing

    saved = torch.arange(10.0)
    checkpoint.mkdir()
    dist_checkpointing.save({**mt.one_weight(saved), "iteration": 5}, str(checkpoint), ("torch_dist", 1))
    loaded = dist_checkpointing.load(mt.one_weight(torch.empty(10)), str(checkpoint))
    return "" if torch.equal(loaded["weight"], saved) else "other values than were saved"


# Up to 0.8 the worker's error is only logged.
FAILURES = (
    "RuntimeError: Worker failure: _write_item()",
    "RuntimeError: Incomplete worker results",
)


if __name__ == "__main__":
    mt.show_result(save_and_load, 1, "saved, and loaded as saved", raises=FAILURES)
