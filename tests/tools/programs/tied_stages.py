"""Train a pipeline of two stages that share an embedding, with the real DeepSpeed.

    tied_stages.py train OUT RANKS           OUT/global_step2, and beside it truth.pt: the live states by parameter
    tied_stages.py load OUT RANKS            load OUT/universal into a run with other weights

`load` prints the states that differ from truth.pt on a rank.
"""

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from trainers import deepspeed_training as dt

HIDDEN, SAMPLES, BATCHES, STAGES = 4, 4, 2, 2


class Embedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def head(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ embedding.weight.t()


def engine(seed: int, *, universal: bool = False, tensor_parallel: int = 1) -> Any:
    """An engine. Each tensor-parallel rank has its own values, as if they were its slices."""
    if tensor_parallel > 1:
        ranks = torch.distributed.get_world_size() // STAGES // tensor_parallel
        topology = PipeModelDataParallelTopology(num_pp=STAGES, num_mp=tensor_parallel, num_dp=ranks)
        seed += topology.get_coord(torch.distributed.get_rank()).model
        stages: dict[str, Any] = {"topology": topology}
    else:
        stages = {"num_stages": STAGES}
    torch.manual_seed(seed)
    layers = [
        TiedLayerSpec("embedding", Embedding),
        LayerSpec(torch.nn.Linear, HIDDEN, HIDDEN),
        LayerSpec(torch.nn.LayerNorm, HIDDEN),
        TiedLayerSpec("embedding", Embedding, forward_fn=head),
    ]
    model = PipelineModule(
        layers, **stages, loss_fn=dt.loss, partition_method="uniform", activation_checkpoint_interval=0
    )
    config = dt.config(SAMPLES, universal, dt.BF16, dt.zero(1), {"gradient_accumulation_steps": BATCHES})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(run: Any, first: int = 0) -> None:
    samples = torch.Generator().manual_seed(first)
    for _ in range(dt.STEPS):
        batches = [torch.randn(SAMPLES, HIDDEN, generator=samples).bfloat16() for _ in range(BATCHES)]
        run.train_batch(iter([(batch, torch.ones(SAMPLES, HIDDEN)) for batch in batches]))


def live(run: Any) -> dict[str, torch.Tensor]:
    """The complete states of this rank's stage, from its optimizer's partitions."""
    names, group = dt.names_of(run), run.optimizer.real_dp_process_group[0]
    states: dict[str, torch.Tensor] = {}
    for master, parameters in dt.flat_groups(run):
        own = {"fp32": master.detach(), **run.optimizer.optimizer.state[master]}
        for key in ("fp32", *dt.MOMENTS):
            parts = [torch.empty_like(own[key]) for _ in range(torch.distributed.get_world_size(group))]
            torch.distributed.all_gather(parts, own[key].contiguous(), group=group)
            for parameter, part in dt.cut(torch.cat(parts), parameters):
                states[f"{names[parameter]}.{key}"] = part
    return states


def train_and_save(rank: int, out: Path) -> None:
    run = engine(seed=0)
    train(run)
    dt.save(run, out)
    of_all = dt.gathered(live(run))
    if rank == 0:
        for one in of_all[1:]:
            assert all(of_all[0].get(key, value).equal(value) for key, value in one.items())
        torch.save({key: value for one in of_all for key, value in one.items()}, out / dt.TRUTH)


def load(rank: int, out: Path) -> list[str]:
    run = engine(seed=1, universal=True)
    dt.load(run, out, dt.UNIVERSAL)
    truth = torch.load(out / dt.TRUTH)
    found = live(run)
    found |= {f"{name}.weight": weight.detach().clone() for weight, name in dt.names_of(run).items()}
    truth |= {key.removesuffix(".fp32") + ".weight": value.bfloat16() for key, value in truth.items() if ".fp32" in key}
    wrong = dt.on_any_rank([key for key, value in found.items() if not value.equal(truth[key])])
    train(run)
    return wrong


def main() -> None:
    does = {"train": train_and_save, "load": load}[sys.argv[1]]
    print(json.dumps(dt.results(does, int(sys.argv[3]), Path(sys.argv[2]))[0]))


if __name__ == "__main__":
    main()
