"""Train a small model with the real megatron-core, and save it as Megatron-LM does.

The model has an embedding with a padded vocabulary and tokens that never occur, parallel linear layers, a norm and a
frozen layer. With two pipeline stages, each has a part of the model and trains it by itself. OUT/race_0000 and the
following are copies of the last zarr save in which slices of arrays are lost as in a race between the ranks' writes:
only the creator of an array writes without its lock, and writes back the zeros that it read before others wrote; or
another rank does, and the creator's slice is lost. Prints JSON: for each copy, by array, the lost slices of its first
chunk, and the ranges that differ by that.

With `--reload` the optimizer is the hybrid CPU-offload one; "hybrid" loads weights into the model only, as for
finetuning. With `--memory zeros` new memory is zeroed, and buckets' padding is saved as zeros.

    megatron_saving.py OUT [--ranks 4] [--tp 1] [--pp 1] [--dtype bf16] [--iterations 0,1,3] [--races 0] [--seed 0]
        [--format fully_sharded_model_space] [--backend zarr|torch_dist|torch] [--reload no|none|hybrid]
        [--memory any|zeros]
"""

import argparse
import json
import random
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from program_arguments import parsed
from trainers import megatron_training as mt

VOCABULARY, SEEN, HIDDEN = 64, 40, 12  # tokens from SEEN on are padding; half of the others never occur


def main() -> None:
    options = parsed(
        {"out": Path}, ranks=4, tp=1, pp=1, dtype="bf16", iterations=[0, 1, 3], races=0, seed=0,
        format="fully_sharded_model_space", backend="zarr", reload="no", memory="any",
    )  # fmt: skip
    mt.spawn(worker, options.ranks, options, tensor_parallel=options.tp, pipeline_parallel=options.pp)


def build(options: argparse.Namespace) -> tuple[Any, Any]:
    mt.use_inner_optimizer("fused")
    fraction = None if options.reload == "no" else 1.0
    return mt.build(fp16=options.dtype == "fp16", make_model=language_model, offload_fraction=fraction)


def worker(rank: int, options: argparse.Namespace) -> None:
    model, optimizer = build(options)
    if options.memory == "zeros":
        torch.empty = torch.zeros
    if options.reload == "hybrid":
        step(model, optimizer, 0)
        mt.set_weights(model, {name: torch.full_like(value, 0.75) for name, value in mt.weights(model).items()})
        optimizer.reload_model_params()
    for iteration in range(max(options.iterations) + 1):
        if iteration in options.iterations:
            save(model, optimizer, iteration, options.out / f"iter_{iteration:07}", options)
        if iteration < max(options.iterations):
            step(model, optimizer, options.seed + iteration)
    owned = slices(state(model, optimizer, 0, options)) if options.races else {}
    if rank == 0:
        whole = options.out / f"iter_{max(options.iterations):07}"
        races = ((options.out / f"race_{n:04}", random.Random(options.seed * 1000 + n)) for n in range(options.races))
        print(json.dumps({folder.name: raced(whole, folder, owned, chosen) for folder, chosen in races}))


def language_model(config: Any, dtype: torch.dtype, native_fp32: bool) -> Any:
    """An embedding, a feed-forward block and a norm, with one frozen layer."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.transformer.module import MegatronModule

    config.use_cpu_initialization = True

    def initialize(weight: torch.Tensor) -> None:
        torch.nn.init.normal_(weight, std=0.3)

    options = {"config": config, "init_method": initialize, "bias": True, "skip_bias_add": False}

    class First(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.embedding = VocabParallelEmbedding(VOCABULARY, HIDDEN, init_method=initialize, config=config)
            self.up = ColumnParallelLinear(HIDDEN, HIDDEN, gather_output=True, **options)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.up(self.embedding(tokens))[0]
            return out

    class Last(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.down = RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=False, **options)
            self.norm = torch.nn.LayerNorm(HIDDEN)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = torch.nn.functional.one_hot(tokens % HIDDEN, HIDDEN).to(dtype)
            out: torch.Tensor = self.norm(self.down(x)[0])
            return out

    class Block(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.embedding = VocabParallelEmbedding(VOCABULARY, HIDDEN, init_method=initialize, config=config)
            self.up = ColumnParallelLinear(HIDDEN, 4 * HIDDEN, gather_output=False, **options)
            self.down = RowParallelLinear(4 * HIDDEN, HIDDEN, input_is_parallel=True, **options)
            self.norm = torch.nn.LayerNorm(HIDDEN)
            self.frozen = torch.nn.Linear(HIDDEN, HIDDEN)
            self.frozen.requires_grad_(False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            x = self.frozen(self.down(torch.nn.functional.gelu(self.up(x)[0]))[0] + x)
            out: torch.Tensor = self.norm(x)
            return out

    kind = Block
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        kind = First if parallel_state.is_pipeline_first_stage() else Last
    return kind().to(dtype)


def step(model: Any, optimizer: Any, seed: int) -> None:
    """Train one step on tokens that depend only on the seed. They are even: odd tokens never occur."""
    generator = torch.Generator().manual_seed(seed)
    tokens = 2 * torch.randint(0, SEEN // 2, (4, 16), generator=generator).cuda()
    mt.update(model, optimizer, lambda: (model(tokens).float() - 1).pow(2).mean())


def save(model: Any, optimizer: Any, iteration: int, folder: Path, options: argparse.Namespace) -> None:
    """Save as Megatron-LM does: model, optimizer, iteration and arguments."""
    if options.backend == "torch":
        save_in_torch_format(model, optimizer, iteration, folder / model_parallel_folder(options), options)
    else:
        mt.write(state(model, optimizer, iteration, options), folder, options.backend)


def model_parallel_folder(options: argparse.Namespace) -> str:
    """The folder's name in Megatron-LM."""
    from megatron.core import parallel_state

    stage = f"_{parallel_state.get_pipeline_model_parallel_rank():03}" if options.pp > 1 else ""
    return f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02}{stage}"


def save_in_torch_format(model: Any, optimizer: Any, iteration: int, folder: Path, options: argparse.Namespace) -> None:
    from megatron.core import parallel_state

    folder.mkdir(parents=True, exist_ok=True)
    mt.inner(optimizer).save_parameter_state(str(folder / "distrib_optim.pt"))
    if parallel_state.get_data_parallel_rank() == 0:
        weights = {name: p.detach().clone() for name, p in model.module.named_parameters()}
        content = {
            "model": weights,
            "optimizer": optimizer.state_dict(),
            "iteration": iteration,
            "args": arguments(iteration, options),
            "checkpoint_version": 3.0,
        }
        torch.save(content, folder / "model_optim_rng.pt")
    dist.barrier()


def state(model: Any, optimizer: Any, iteration: int, options: argparse.Namespace) -> dict[str, Any]:
    sharded = mt.sharded_state_dict(options.format, model, optimizer, is_loading=False)
    return {**sharded, "iteration": iteration, "args": arguments(iteration, options), "checkpoint_version": 3.0}


def arguments(iteration: int, options: argparse.Namespace) -> argparse.Namespace:
    """The run's arguments."""
    return argparse.Namespace(
        iteration=iteration,
        world_size=options.ranks,
        consumed_train_samples=4 * iteration,
        data_parallel_size=options.ranks // options.tp // options.pp,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        padded_vocab_size=VOCABULARY,
        **{options.dtype: True},
    )


def slices(sharded: dict[str, Any]) -> dict[str, dict[int, list[int]]]:
    """By array, the ranges of its first chunk that each rank writes."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

    apply_factories(sharded)
    own = [
        (tensor.key, tensor.flattened_range.start, tensor.flattened_range.stop)
        for tensor in nested_values(sharded)
        if isinstance(tensor, ShardedTensor)
        and tensor.flattened_range is not None
        and is_main_replica(tensor.replica_id)
        and set(tensor.global_offset) == {0}
    ]
    found: dict[str, dict[int, list[int]]] = defaultdict(dict)
    for rank, of_rank in enumerate(mt.gathered(own)):
        for key, begin, end in of_rank:
            found[key][rank] = [begin, end]
    return found


def raced(whole: Path, folder: Path, owned: dict[str, dict[int, list[int]]], chosen: random.Random) -> dict[str, Any]:
    """Copy a checkpoint, in which some slices are lost. Returns these, and the ranges that differ, by array."""
    shutil.copytree(whole, folder)
    lost, different = {}, {}
    for key, own in sorted(owned.items()):
        creator, *others = sorted(own, key=own.__getitem__)
        late = chosen.choice([creator, creator, *others])
        between = [creator] if late != creator else [rank for rank in others if chosen.random() < 0.6]
        if not between:
            continue
        lost[key] = joined(own[rank] for rank in between)
        (chunk,) = [path for path in (folder / key).iterdir() if set(path.name) <= set("0.")]
        values = np.memmap(chunk, np.uint32, "r+")  # fp32
        before = values.copy()
        for begin, end in lost[key]:
            values[begin:end] = 0
        edges = np.flatnonzero(np.diff(np.concatenate([[False], before != values, [False]]).astype(np.int8)))
        if len(edges):
            different[key] = edges.reshape(-1, 2).tolist()
    return {"slices": lost, "different": different}


def joined(slices: Iterable[list[int]]) -> list[list[int]]:
    """The slices, with adjacent ones joined."""
    found: list[list[int]] = []
    for begin, end in sorted(slices):
        if found and found[-1][1] == begin:
            found[-1][1] = end
        else:
            found.append([begin, end])
    return found


if __name__ == "__main__":
    main()
