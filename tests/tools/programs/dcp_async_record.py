"""Save a training and its record with `dcp.async_save`, and step before it writes: dcp_async_record.py FOLDER"""

import sys
import threading
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from ckpt_patches import fingerprint
from dcp_saving import begin
from trainers.dcp_saving import AfterStep
from trainers.ranks import free_port, results


def save(rank: int, port: int, folder: Path) -> None:
    begin(rank, 1, port)
    model = nn.Module()  # a temperature under tensor parallelism
    model.scale = nn.Parameter(DTensor.from_local(torch.tensor(2.0), init_device_mesh("cpu", (1,)), [Replicate()]))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model.scale.sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    record = fingerprint.of_training(model, optimizer)
    state = {"model": weights, "optimizer": states, "ckpt_patches_fingerprint": record}
    stepped = threading.Event()
    saving = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(folder), planner=AfterStep(stepped))
    model.scale.sum().backward()
    optimizer.step()
    stepped.set()
    saving.result()


if __name__ == "__main__":
    results(save, 1, free_port(), Path(sys.argv[1]))
