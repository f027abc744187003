"""Save the optimizer's state of the real megatron-core as `fully_reshardable`, and beside it the state of the ranks.

The model has sizes that fill no bucket, small biases, constant norms and rows without gradient. OUT/shifted has many
buckets, OUT/one_bucket one. OUT/<name>.<rank>.pt has the state of each parameter of a tensor-parallel rank, taken from
the live optimizers' shards.

With `--gloo` the state is gathered on one rank, as the memory-efficient option does.

With `--load FOLDER` the program loads that checkpoint into the model with many buckets instead, as upstream does, and
prints JSON: by tensor-parallel rank, for each parameter and state, the elements that differ from OUT/<name>.<rank>.pt,
the name being that of the folder.

    shifted_saving.py OUT [--ranks 2] [--tp 1] [--gloo] [--load FOLDER] [--bucket 300]
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from program_arguments import parsed
from trainers import megatron_training as mt

VOCABULARY, SEEN, HIDDEN, SIZES = 62, 41, 13, (130, 21, 40, 7)
RATE = 1e-3  # after one step at this rate a norm's weights are still 1 in bf16, but its main parameters are not


def main() -> None:
    options = parsed({"out": Path}, ranks=2, tp=1, gloo=False, load=Path, bucket=300)
    mt.spawn(load if options.load else save, options.ranks, options, tensor_parallel=options.tp)


def odd(config: Any, dtype: torch.dtype, native_fp32: bool) -> Any:
    """An embedding, a parallel feed-forward block, and linear layers of these sizes, with norms between them."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.transformer.module import MegatronModule

    config.use_cpu_initialization = True

    def initialize(weight: torch.Tensor) -> None:
        torch.nn.init.normal_(weight, std=0.3)

    class Block(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.embedding = VocabParallelEmbedding(VOCABULARY, HIDDEN, init_method=initialize, config=config)
            options = {"config": config, "init_method": initialize, "bias": True, "skip_bias_add": False}
            self.up = ColumnParallelLinear(HIDDEN, 2 * 33, gather_output=False, **options)
            self.down = RowParallelLinear(2 * 33, HIDDEN, input_is_parallel=True, **options)
            self.norm = torch.nn.LayerNorm(HIDDEN)
            self.layers = torch.nn.ModuleList(
                torch.nn.Linear(fan_in, fan_out) for fan_in, fan_out in itertools.pairwise((HIDDEN, *SIZES))
            )
            self.late_norm = torch.nn.LayerNorm(SIZES[0])

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            x = self.norm(self.down(torch.nn.functional.gelu(self.up(x)[0]))[0] + x)
            x = self.late_norm(self.layers[0](x))
            for layer in list(self.layers)[1:]:
                x = layer(torch.tanh(x))
            return x

    return Block().to(dtype)


def step(model: Any, optimizer: Any) -> None:
    tokens = torch.randint(0, SEEN, (4, 16), generator=torch.Generator().manual_seed(1)).cuda()
    mt.update(model, optimizer, lambda: (model(tokens).float() - 1).pow(2).mean())


def sharded(model: Any, optimizer: Any, options: argparse.Namespace, *, is_loading: bool) -> dict[str, Any]:
    """The state dict as in Megatron-LM, which stores its settings in the checkpoint."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": options.gloo,
    }
    of_model = model.sharded_state_dict()
    of_optimizer = optimizer.sharded_state_dict(of_model, is_loading=is_loading, metadata=metadata)
    found = {"model": of_model, "optimizer": of_optimizer, "content_metadata": metadata}
    return {key: value for key, value in found.items() if value is not None}


def live(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """The main parameter and moments of each parameter of this tensor-parallel rank."""
    from megatron.core import parallel_state

    state = mt.optimizer_state(model, optimizer, parallel_state.get_data_parallel_group())
    return {"/".join(name.rsplit(".", 1)): tensor for name, tensor in state.items()}


def save(rank: int, options: argparse.Namespace) -> None:
    from megatron.core import parallel_state

    mt.use_inner_optimizer("fused")
    for name, bucket_size in (("shifted", 300), ("one_bucket", None)):
        model, optimizer = mt.build(make_model=odd, bucket_size=bucket_size)
        for group in optimizer.param_groups:
            group["lr"] = RATE
        step(model, optimizer)
        mt.write(sharded(model, optimizer, options, is_loading=False), options.out / name, "torch_dist")
        states = live(model, optimizer)
        if parallel_state.get_data_parallel_rank() == 0:
            torch.save(states, f"{options.out / name}.{parallel_state.get_tensor_model_parallel_rank()}.pt")
        dist.barrier()


def load(rank: int, options: argparse.Namespace) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    mt.use_inner_optimizer("fused")
    model, optimizer = mt.build(make_model=odd, bucket_size=options.bucket or None)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer.reload_model_params()
    loaded = dist_checkpointing.load(sharded(model, optimizer, options, is_loading=True), str(options.load))
    mt.set_weights(model, loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    tp = parallel_state.get_tensor_model_parallel_rank()
    truth, state = torch.load(f"{options.load}.{tp}.pt"), live(model, optimizer)
    bits = {key: state[key].view(torch.int32) != truth[key].view(torch.int32) for key in state}
    wrong = {key: other.nonzero().flatten().tolist() for key, other in bits.items() if other.any()}
    everyone = mt.gathered((tp, wrong))
    if rank == 0:
        print(json.dumps(dict(sorted(everyone))))


if __name__ == "__main__":
    main()
