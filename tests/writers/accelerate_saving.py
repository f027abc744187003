"""Save with Accelerate: `accelerate_saving.py FOLDER fsdp1|fsdp1_original|fsdp2|ddp|weights`.

Accelerate does not enable its FSDP plugin on a CPU, so this program calls the functions that `save_state` would call.
`ddp` is `save_state`, `weights` is `save_model` in shards.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

from writers.small_model import SmallModel, fsdp1, fsdp2, on_ranks, take_steps


def save(folder: str, kind: str) -> None:
    accelerator = Accelerator(cpu=True)
    model: torch.nn.Module = SmallModel()
    if kind in ("ddp", "weights"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        take_steps(model, optimizer)
        if kind == "ddp":
            accelerator.save_state(folder)
        else:
            accelerator.save_model(model, folder, max_shard_size="4KB")
        return
    model = fsdp2(model) if kind == "fsdp2" else fsdp1(model, keeps_parameters=kind == "fsdp1_original")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    take_steps(model, optimizer)
    Path(folder).mkdir(parents=True, exist_ok=True)
    version = 2 if kind == "fsdp2" else 1
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)


if __name__ == "__main__":
    on_ranks(save, sys.argv[1], sys.argv[2])
