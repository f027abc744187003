"""Save a training and its record with `dcp.async_save`, and step before it writes: dcp_async_record.py FOLDER"""

import sys
import threading
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckpt_patches import fingerprint
from dcp_saving import Case, begin, trained
from trainers.dcp_saving import AfterStep
from trainers.ranks import free_port, results


def save(rank: int, port: int, folder: Path) -> None:
    begin(rank, 1, port)
    model, optimizer = trained(Case(""))
    record = fingerprint.of_training(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "ckpt_patches_fingerprint": record}
    stepped = threading.Event()
    saving = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(folder), planner=AfterStep(stepped))
    with torch.no_grad():
        for param in model.parameters():
            param += 1
    stepped.set()
    saving.result()


if __name__ == "__main__":
    results(save, 1, free_port(), Path(sys.argv[1]))
