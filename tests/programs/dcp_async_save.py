"""Save with `dcp.async_save` on one rank, and step before it writes.

dcp_async_save.py id|writer FOLDER [KIND ...]     prints the kinds of tensors whose saved values are of the step
dcp_async_save.py cached FOLDER                   prints a scalar DTensor's staged value of two saves, at 0 and at 1
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from ckpt_patches.demo import dcp_saving
from ckpt_patches.demo.ranks import free_port


def staged_values() -> list[float]:
    """The values that a stager with a cache returns, read after another step."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    local = torch.zeros(dcp_saving.SHAPE)
    found = []
    for _ in range(2):
        # As a state dict of each save has it: another object on the same memory.
        staged = stager.stage({"scale": dcp_saving.KINDS["scalar DTensor"](local)})
        local += 1
        found.append(staged["scale"].item())
    dist.destroy_process_group()
    return found


def main(target: str, folder: Path, *kinds: str) -> None:
    if target == "cached":
        print(json.dumps(staged_values()))
        return
    chosen = {"kinds": kinds} if kinds else {}
    print(json.dumps(dcp_saving.save_and_step(0, folder, by_writer=target == "writer", **chosen)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
