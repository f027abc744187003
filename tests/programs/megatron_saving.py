"""Train a small model with the real megatron-core, and save it as Megatron-LM does, some saves in a forced race.

The model has an embedding with a padded vocabulary and tokens that never occur, parallel linear layers, a norm and a
frozen layer. OUT/iter_0000003 is complete; OUT/race_0000 and the following are zarr saves of the same state in which
the creator of an array, or another rank, writes back stale data after other ranks have written. Prints JSON: for each
race, by array, the slices of its first chunk that the order of the writes loses, and the ranges that differ from the
complete save.

With `--reload` the optimizer is the hybrid CPU-offload one; "hybrid" loads weights into the model only, as for
finetuning. With `--memory zeros` new memory is zeroed, and buckets' padding is saved as zeros.

With `--load` the folders of a JSON list are loaded instead of a training; prints the live state of each rank for each
folder as digests by name, or {"error": "..."}. With two pipeline stages, each has a part of the model and trains it by
itself.

    megatron_saving.py OUT [--ranks 4] [--tp 1] [--pp 1] [--dtype bf16] [--iterations 0,1,3] [--races 0] [--seed 0]
        [--format fully_sharded_model_space] [--backend zarr|torch_dist|torch] [--reload no|none|hybrid]
        [--memory any|zeros] [--load FOLDERS.json]
"""

import argparse
import json
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from live_states import by_folder, digest
from patience import seconds
from program_arguments import parsed
from trainers import megatron_training as mt

VOCABULARY, SEEN, HIDDEN = 64, 40, 12  # tokens from SEEN on are padding; half of the others never occur
PATIENCE = seconds(300)  # a plan that waits longer is wrong and fails


def main() -> None:
    options = parsed(
        {"out": Path}, ranks=4, tp=1, pp=1, dtype="bf16", iterations=[0, 1, 3], races=0, seed=0,
        format="fully_sharded_model_space", backend="zarr", reload="no", memory="any", load=Path,
    )  # fmt: skip
    if options.load:
        parallel = options.tp, options.pp

        def load_all(folders: list[str]) -> list[Any]:
            return mt.results(loads, options.ranks, options, folders, parallel=parallel)

        print(json.dumps(by_folder(load_all, json.loads(options.load.read_text()))))
        return
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
            folder = options.out / f"iter_{iteration:07}"
            if options.backend == "zarr":
                Saving(None, model, optimizer, options).save(iteration, folder)
            else:
                save(model, optimizer, iteration, folder, options)
        if iteration < max(options.iterations):
            step(model, optimizer, options.seed + iteration)
    lost = {}
    for number in range(options.races):
        folder = options.out / f"race_{number:04}"
        saving = Saving(options.seed * 1000 + number, model, optimizer, options)
        saving.save(max(options.iterations), folder)
        if rank == 0:
            different = different_ranges(options.out / f"iter_{max(options.iterations):07}", folder)
            lost[folder.name] = {"slices": saving.lost, "different": different}
    if rank == 0:
        print(json.dumps(lost))


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


def loads(rank: int, options: argparse.Namespace, folders: list[str]) -> list[dict[str, str]]:
    return [live(*load(Path(folder), options)) for folder in folders]


def load(folder: Path, options: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    """Load in Megatron-LM's order, into a model with other numbers; return the other values that it reads."""
    from megatron.core import dist_checkpointing

    model, optimizer = build(options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    optimizer.reload_model_params()
    if options.backend == "torch":
        own = folder / model_parallel_folder(options)
        loaded = torch.load(own / "model_optim_rng.pt", weights_only=False)
        mt.set_weights(model.module, loaded["model"])
    else:
        wanted = mt.sharded_state_dict(options.format, model, optimizer, is_loading=True)
        loaded = dist_checkpointing.load(wanted, str(folder))
        mt.set_weights(model, loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    if options.backend == "torch":
        mt.inner(optimizer).load_parameter_state(str(own / "distrib_optim.pt"))
    rest = {
        "iteration": loaded["iteration"],
        "checkpoint_version": loaded.get("checkpoint_version", 0),
        "consumed_train_samples": getattr(loaded.get("args"), "consumed_train_samples", 0),
    }
    return model, optimizer, rest


def live(model: Any, optimizer: Any, rest: dict[str, Any]) -> dict[str, str]:
    """Digests of this rank's live state."""
    own = mt.inner(optimizer).optimizer
    groups = [{key: value for key, value in group.items() if key != "params"} for group in own.param_groups]
    params = [parameter for group in own.param_groups for parameter in group["params"]]
    states = [dict(sorted(own.state[parameter].items())) for parameter in params]
    scaler = getattr(mt.inner(optimizer), "grad_scaler", None)
    found = {
        "weights": list(model.parameters()),
        "masters": params,
        "states": states,
        "groups": [dict(sorted(group.items())) for group in groups],
        "scaler": scaler.state_dict() if scaler else None,
        **rest,
    }
    return {name: digest(value) for name, value in found.items()}


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


class Saving:
    """A zarr save with planned write order; complete without a seed.

    Only the creator of an array writes without its lock. With a seed, there are two cases. The creator is late, and
    writes back what it read before randomly chosen other ranks wrote: their slices are lost. Or another rank is late,
    and the creator's slice is lost. Without a seed, the creator writes before all others.
    """

    def __init__(self, seed: int | None, model: Any, optimizer: Any, options: argparse.Namespace) -> None:
        self.rank, self.model, self.optimizer, self.options = dist.get_rank(), model, optimizer, options
        self.random = None if seed is None else random.Random(seed)
        self.array = ""  # the array that is being written

    def save(self, iteration: int, folder: Path) -> None:
        import zarr

        self.signals = folder.parent / f"signals.{folder.name}"
        if self.rank == 0:
            self.signals.mkdir(parents=True)
        self.plan()
        dist.barrier()
        write, read_chunk = zarr.Array.set_coordinate_selection, zarr.Array._process_for_setitem
        zarr.Array.set_coordinate_selection = lambda array, *args, **kw: self.write(write, array, *args, **kw)
        zarr.Array._process_for_setitem = lambda array, *args, **kw: self.read(read_chunk, array, *args, **kw)
        try:
            save(self.model, self.optimizer, iteration, folder, self.options)
        finally:
            zarr.Array.set_coordinate_selection, zarr.Array._process_for_setitem = write, read_chunk
        if self.rank == 0:
            shutil.rmtree(self.signals)

    def plan(self) -> None:
        """Choose for each array the late rank, and the ranks that write between its read and its write."""
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

        sharded = state(self.model, self.optimizer, 0, self.options)
        apply_factories(sharded)
        own = [
            (tensor.key, tensor.flattened_range.start, tensor.flattened_range.stop)
            for tensor in nested_values(sharded)
            if isinstance(tensor, ShardedTensor)
            and tensor.flattened_range is not None
            and is_main_replica(tensor.replica_id)
            and set(tensor.global_offset) == {0}
        ]
        self.own = {key for key, _, _ in own}
        owned: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(owned, own)
        slices: dict[str, dict[int, list[int]]] = defaultdict(dict)
        for rank, keys in enumerate(owned):
            for key, begin, end in keys:
                slices[key][rank] = [begin, end]
        self.order = {key: self.choose(sorted(own, key=own.__getitem__)) for key, own in sorted(slices.items())}
        self.lost = {
            key: joined(slices[key][rank] for rank in ranks) for key, (_, ranks) in self.order.items() if ranks
        }

    def choose(self, ranks: list[int]) -> tuple[int, list[int]]:
        """Choose the late rank of an array (the creator is its first rank), and the ranks that write between."""
        creator, *others = ranks
        if self.random is None:
            return creator, []
        late = self.random.choice([creator, creator, *others])
        return late, [creator] if late != creator else [rank for rank in others if self.random.random() < 0.6]

    def write(self, write: Callable[..., Any], array: Any, *args: Any, **keywords: Any) -> Any:
        """Ranks that write between wait until the late one has read, all others until it has written."""
        self.array = Path(array.store.path).name
        if self.array not in self.own:
            return write(array, *args, **keywords)
        late, between = self.order[self.array]
        if self.rank in between:
            self.wait("read", late)
        elif self.rank != late:
            self.wait("written", late)
        result = write(array, *args, **keywords)
        self.signal("written", self.rank)
        return result

    def read(self, read_chunk: Callable[..., Any], array: Any, *args: Any, **keywords: Any) -> Any:
        chunk = read_chunk(array, *args, **keywords)
        late, between = self.order.get(self.array, (-1, []))
        if self.rank == late:
            self.signal("read", late)
            for rank in between:
                self.wait("written", rank)
        return chunk

    def signal(self, what: str, rank: int) -> None:
        (self.signals / f"{self.array}.{what}.{rank}").touch()

    def wait(self, what: str, rank: int) -> None:
        deadline = time.time() + PATIENCE
        while not (self.signals / f"{self.array}.{what}.{rank}").exists():
            if time.time() > deadline:
                raise TimeoutError(f"rank {self.rank} waited for {rank} to have {what} {self.array}")
            time.sleep(0.001)


def joined(slices: Iterable[list[int]]) -> list[list[int]]:
    """The slices, with adjacent ones joined."""
    found: list[list[int]] = []
    for begin, end in sorted(slices):
        if found and found[-1][1] == begin:
            found[-1][1] = end
        else:
            found.append([begin, end])
    return found


def different_ranges(whole: Path, raced: Path) -> dict[str, list[list[int]]]:
    """The ranges in which the optimizer state's first chunks differ, as raw fp32. No other chunk may differ."""
    import numpy as np

    found: dict[str, list[list[int]]] = {}
    for path in sorted(whole.glob("optimizer.state.*/[0-9]*")):
        one, other = (np.fromfile(folder / path.relative_to(whole), np.uint32) for folder in (whole, raced))
        edges = np.flatnonzero(np.diff(np.concatenate([[False], one != other, [False]]).astype(np.int8)))
        if len(edges):
            assert set(path.name) <= set("0."), path
            found[path.parent.name] = edges.reshape(-1, 2).tolist()
    return found


if __name__ == "__main__":
    main()
