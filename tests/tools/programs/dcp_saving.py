"""Train a small model with plain torch on Gloo ranks, and save it with torch.distributed.checkpoint.

    dcp_saving.py FOLDER CASES.json [RANKS]

CASES is a list of `Case` as dicts; each writes FOLDER/<name>. All run on the same ranks, four by default. A save of
"ranks" has no index, but one file of torch.save per rank, as verl's FSDPCheckpointManager writes them.
"""

import contextlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from trainers.ranks import free_port, results

RANKS, ROWS, WIDTH, TOKENS, CPU = 4, 8, 24, 37, torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One training and its save."""

    name: str  # of the folder
    mesh: str = "fsdp"  # fsdp, hsdp, fsdp_tp, dp_tp, tp, ddp, replicate, fsdp1, fsdp1_flat, none
    save: str = "nested"  # nested, flat, raw, local, weights, folders, async, ranks
    optimizer: str = "AdamW"
    dtype: str = "float32"
    steps: int = 3
    seed: int = 0
    scale: float = 1.0  # of the loss
    options: dict[str, bool] = field(default_factory=dict)  # frozen, unused, tied, strided, zeros, groups
    damage: tuple[Any, ...] = ()  # (parameter, state or "weight", first element, end of the range, value), in the save


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(self.up(x).tanh())
        return found


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.register_buffer("positions", torch.arange(float(ROWS)))
        if case.options.get("tied"):
            self.head.weight = self.embed.weight
        if case.options.get("unused"):
            self.extra = nn.Linear(WIDTH, WIDTH)
        if case.options.get("strided"):
            self.conv = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
        if case.options.get("zeros"):
            nn.init.zeros_(self.layers[0].down.weight)
        if case.options.get("frozen"):
            self.embed.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        if hasattr(self, "conv"):
            x = x + self.conv(torch.ones(1, 8, 3, 3, dtype=x.dtype)).mean()
        found: torch.Tensor = self.head(self.norm(x))
        return found


def distributed(model: Model, mesh: str) -> nn.Module:
    """The model, distributed over the ranks of the mesh."""
    ranks = dist.get_world_size()
    if mesh == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if mesh == "replicate":
        replicate(model)
    if mesh.startswith("fsdp1"):
        policy = ModuleWrapPolicy({Block})
        own = mesh == "fsdp1"
        return FullyShardedDataParallel(model, None, auto_wrap_policy=policy, device_id=CPU, use_orig_params=own)
    if mesh in ("tp", "dp_tp", "fsdp_tp"):
        tensor_parallel = ranks if mesh == "tp" else 2
        both = init_device_mesh("cpu", (ranks // tensor_parallel, tensor_parallel), mesh_dim_names=("dp", "tp"))
        for layer in model.layers:
            parallelize_module(layer, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        sharding = {"mesh": both["dp"]}
    else:
        shape, names = ((2, ranks // 2), ("replicas", "shards")) if mesh == "hsdp" else ((ranks,), ("shards",))
        sharding = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
    if mesh in ("fsdp", "hsdp", "fsdp_tp"):
        for layer in model.layers:
            fully_shard(layer, **sharding)
        fully_shard(model, **sharding)
    return model


def optimizer_of(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    parameters: Any = list(model.parameters())
    if case.options.get("groups"):
        parameters = [{"params": parameters[:3], "weight_decay": 0.0}, {"params": parameters[3:]}]
    options: dict[str, Any] = {"lr": 1e-2}
    if case.optimizer == "SGD":
        options["momentum"] = 0.9
    made: torch.optim.Optimizer = getattr(torch.optim, case.optimizer)(parameters, **options)
    return made


def trained(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(case.seed)
    model = distributed(Model(case).to(getattr(torch, case.dtype)), case.mesh)
    optimizer = optimizer_of(model, case)
    for step in range(case.steps):
        torch.manual_seed(1000 * case.seed + step)
        tokens = torch.randint(0, TOKENS, (4, ROWS))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()) * case.scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_ranks(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Save as verl does, without the files of Hugging Face."""
    count, rank = dist.get_world_size(), dist.get_rank()
    path.mkdir(parents=True, exist_ok=True)
    is_fsdp1 = isinstance(model, FullyShardedDataParallel)
    sharded = FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    with sharded if is_fsdp1 else contextlib.nullcontext():
        parts: dict[str, Any] = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    scheduler = {"base_lrs": [1e-2], "last_epoch": steps, "_last_lr": [1e-2]}
    parts["extra_state"] = {"lr_scheduler": scheduler, "rng": {"cpu": torch.get_rng_state()}}
    for name, part in parts.items():
        torch.save(part, path / f"{name}_world_size_{count}_rank_{rank}.pt")
    config = {"FSDP_version": 1 if is_fsdp1 else 2, "world_size": count}
    (path / "fsdp_config.json").write_text(json.dumps(config))


def state_of(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if case.save == "raw":
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if case.save == "local":
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    options = StateDictOptions(flatten_optimizer_state_dict=case.save == "flat")
    weights, states = get_state_dict(model, optimizer, options=options)
    return dict(weights) if case.save == "weights" else {"model": weights, "optimizer": states, "step": case.steps}


def damaged(state: dict[str, Any], damage: tuple[Any, ...]) -> None:
    """Set elements of a tensor in the state to be saved, on the ranks that hold them."""
    if not damage:
        return
    parameter, what, begin, end, value = damage
    tensor = state["model"][parameter] if what == "weight" else state["optimizer"]["state"][parameter][what]
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    whole.view(-1)[begin:end] = float(value)
    if whole is not tensor:
        made = torch.distributed.tensor.distribute_tensor(whole, tensor.device_mesh, tensor.placements)
        tensor.to_local().copy_(made.to_local())


def save(case: Case, folder: Path) -> None:
    model, optimizer = trained(case)
    path = folder / case.name
    if case.save == "ranks":
        save_ranks(path, model, optimizer, case.steps)
        return
    with torch.no_grad():
        state = state_of(case, model, optimizer)
        damaged(state, case.damage)
    if case.save == "folders":
        dcp.save({"model": state["model"]}, checkpoint_id=path / "pytorch_model_fsdp_0")
        dcp.save({"optimizer": state["optimizer"]}, checkpoint_id=path / "optimizer_0")
    elif case.save == "async":
        dcp.async_save(state, checkpoint_id=path).result()
    else:
        dcp.save(state, checkpoint_id=path)


def begin(rank: int, ranks: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)


def rank_main(rank: int, ranks: int, port: int, folder: str, cases: list[dict[str, Any]]) -> None:
    begin(rank, ranks, port)
    for case in cases:
        with contextlib.redirect_stderr(None) if rank else contextlib.nullcontext():
            save(Case(**{**case, "damage": tuple(case.get("damage", ()))}), Path(folder))
        dist.barrier()


if __name__ == "__main__":
    count = int(sys.argv[3]) if len(sys.argv) > 3 else RANKS
    results(rank_main, count, count, free_port(), sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
