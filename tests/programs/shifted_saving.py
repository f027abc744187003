"""Save the optimizer's state of the real megatron-core as `fully_reshardable`, and beside it the state of the ranks.

The model has sizes that fill no bucket, small biases, constant norms and rows without gradient. OUT/shifted has many
buckets, OUT/one_bucket one, OUT/even many that need no padding. OUT/<name>.<rank>.npz has the state of each parameter
of a tensor-parallel rank, taken from the live optimizers' shards, and the number of padding elements in the buckets
before it.

With `--gloo` the state is gathered on one rank, as the memory-efficient option does.

With `--load FOLDER` the program loads that checkpoint into the model with many buckets instead, as upstream does, and
prints JSON: by tensor-parallel rank, for each parameter and state, the elements that differ from
OUT/<name>.<rank>.npz, the name being that of the folder.

    shifted_saving.py OUT [--ranks 2] [--tp 1] [--gloo] [--load FOLDER] [--bucket 300]
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from program_arguments import parsed
from trainers import megatron_training as mt

VOCABULARY, SEEN, HIDDEN = 62, 41, 13
RATE = 1e-3  # after one step at this rate a norm's weights are still 1 in bf16, but its main parameters are not


def main() -> None:
    options = parsed({"out": Path}, ranks=2, tp=1, gloo=False, load=Path, bucket=300)
    mt.spawn(worker, options.ranks, options, tensor_parallel=options.tp)


def worker(rank: int, options: argparse.Namespace) -> None:
    mt.use_inner_optimizer("fused")
    if options.load:
        load(rank, options)
        return
    for name, make, bucket_size in (("shifted", odd, 300), ("one_bucket", odd, None), ("even", even, 300)):
        model, optimizer = mt.build(make_model=make, bucket_size=bucket_size)
        for group in optimizer.param_groups:
            group["lr"] = RATE
        step(model, optimizer)
        save(model, optimizer, options.out / name, options)
        keep_live(model, optimizer, options.out / name)


def odd(config: Any, dtype: torch.dtype, native_fp32: bool) -> Any:
    return network(config, dtype, hidden=HIDDEN, up=2 * 33, sizes=(130, 21, 40, 7), bias=True)


def even(config: Any, dtype: torch.dtype, native_fp32: bool) -> Any:
    """Each parameter is a multiple of 384 elements: with two to four data-parallel ranks no bucket is padded."""
    return network(config, dtype, hidden=48, up=64, sizes=(64, 48), bias=False)


def network(config: Any, dtype: torch.dtype, *, hidden: int, up: int, sizes: tuple[int, ...], bias: bool) -> Any:
    """An embedding, a parallel feed-forward block, and linear layers of these sizes, with norms between them."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.transformer.module import MegatronModule

    config.use_cpu_initialization = True

    def initialize(weight: torch.Tensor) -> None:
        torch.nn.init.normal_(weight, std=0.3)

    class Block(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            vocabulary = VOCABULARY if bias else 64
            self.embedding = VocabParallelEmbedding(vocabulary, hidden, init_method=initialize, config=config)
            options = {"config": config, "init_method": initialize, "bias": bias, "skip_bias_add": False}
            self.up = ColumnParallelLinear(hidden, up, gather_output=False, **options)
            self.down = RowParallelLinear(up, hidden, input_is_parallel=True, **options)
            self.norm = torch.nn.LayerNorm(hidden) if bias else torch.nn.Identity()
            widths = (hidden, *sizes)
            self.layers = torch.nn.ModuleList(
                torch.nn.Linear(fan_in, fan_out, bias=bias) for fan_in, fan_out in itertools.pairwise(widths)
            )
            self.late_norm = torch.nn.LayerNorm(sizes[0]) if bias else torch.nn.Identity()

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


def save(model: Any, optimizer: Any, folder: Path, options: argparse.Namespace) -> None:
    mt.write(sharded(model, optimizer, options, is_loading=False), folder, "torch_dist")


def keep_live(model: Any, optimizer: Any, path: Path) -> None:
    """Write one file per tensor-parallel rank, from its first data-parallel rank."""
    from megatron.core import parallel_state

    (buffer,) = mt.inner(optimizer).buffers
    padding = np.cumsum([0, *(bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets)])
    shifts = {f"{name}/shift": padding[buffer.param_index_map[p][2]] for name, p in model.named_parameters()}
    state = {**live(model, optimizer), **shifts}
    if parallel_state.get_data_parallel_rank() == 0:
        rank = parallel_state.get_tensor_model_parallel_rank()
        np.savez(f"{path}.{rank}.npz", **state)
    dist.barrier()


def live(model: Any, optimizer: Any) -> dict[str, Any]:
    """The main parameter and moments of each parameter of this tensor-parallel rank."""
    from megatron.core import parallel_state

    state = mt.optimizer_state(model, optimizer, parallel_state.get_data_parallel_group())
    return {"/".join(name.rsplit(".", 1)): tensor.numpy() for name, tensor in state.items()}


def load(rank: int, options: argparse.Namespace) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    model, optimizer = mt.build(make_model=odd, bucket_size=options.bucket or None)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer.reload_model_params()
    loaded = dist_checkpointing.load(sharded(model, optimizer, options, is_loading=True), str(options.load))
    mt.set_weights(model, loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    tp = parallel_state.get_tensor_model_parallel_rank()
    truth, state = np.load(f"{options.load}.{tp}.npz"), live(model, optimizer)
    wrong = {key: np.flatnonzero(state[key].view(np.uint32) != truth[key].view(np.uint32)).tolist() for key in state}
    everyone = mt.gathered((tp, {key: found for key, found in wrong.items() if found}))
    if rank == 0:
        print(json.dumps(dict(sorted(everyone))))


if __name__ == "__main__":
    main()
