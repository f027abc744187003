"""Save and load with the real packages on CPU ranks, and count what each rank does; prints JSON, by part and rank.

    counting.py zarr OUT --ranks 4 --chunks 16        flattened shards, one chunk per tensor-parallel rank
    counting.py megatron OUT --ranks 4 --formats torch,fully_reshardable [--layers 2] [--hidden 64]
    counting.py zero OUT --ranks 4 --stages 1,3 [--layers 2] [--hidden 64]
    counting.py tool OUT MODULE ARGUMENT...           a command that uses files in OUT

Everything runs twice. The first run imports modules and opens connections; the second one is counted.
"""

import argparse
import functools
import itertools
import json
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from counts import counted

Found = dict[str, Any]
TAG, UNIVERSAL = "global_step1", "universal"
# Entries that Megatron-DeepSpeed adds, and that the converter requires.
CLIENT_STATE = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}, "iteration": 1}


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    for start in (zarr, megatron, zero):
        command = commands.add_parser(start.__name__)
        command.set_defaults(start=start)
        command.add_argument("out", type=Path)
        command.add_argument("--ranks", type=int, required=True)
        command.add_argument("--chunks", type=int, default=16)
        command.add_argument("--formats", type=lambda text: text.split(","), default=[])
        command.add_argument("--stages", type=lambda text: text.split(","), default=[])
        command.add_argument("--layers", type=int, default=2)
        command.add_argument("--hidden", type=int, default=64)
    command = commands.add_parser("tool")
    command.set_defaults(start=tool)
    command.add_argument("out", type=Path)
    command.add_argument("module")
    command.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.start(options)


def report(found: Found, ranks: int, write: Callable[[str], object] = print) -> None:
    """Write the counts of each part as a list by rank."""
    by_rank: list[Any] = [None] * ranks
    dist.all_gather_object(by_rank, found)
    if dist.get_rank() == 0:
        write(json.dumps({part: [one[part] for one in by_rank] for part in found}))


# megatron-core: only the zarr strategy


def zarr(options: argparse.Namespace) -> None:
    from ckpt_patches.demo import zarr_saving

    zarr_saving.spawn(save_chunks, options.ranks, options)


def save_chunks(rank: int, options: argparse.Namespace) -> None:
    """Save as many tensors as needed for `chunks` chunks, one per tensor and tensor-parallel rank."""
    from megatron.core.dist_checkpointing.strategies import zarr as strategy

    from ckpt_patches.demo import zarr_saving

    ranks, rows = options.ranks, 4
    # The two data-parallel ranks of a pair have the same chunks; each pair is one tensor-parallel rank.
    tensors = {
        f"{number}": zarr_saving.flattened_shard(f"state.{number}.w", rank, 2, ranks // 2, (rows, 16))
        for number in range(options.chunks // (ranks // 2))
    }
    saver = strategy.ZarrSaveShardedStrategy("zarr", 1)
    for folder in (options.out / "first", options.out / "second"):
        if rank == 0:
            folder.mkdir()
        dist.barrier()
        with counted(folder) as counts:
            saver.save(tensors, folder)
    report({"save": counts}, ranks)


# megatron-core: complete checkpoints


def megatron(options: argparse.Namespace) -> None:
    from ckpt_patches.demo import megatron_training as mt

    mt.spawn(save_and_load, options.ranks, options)


def save_and_load(rank: int, options: argparse.Namespace) -> None:
    from ckpt_patches.demo import megatron_training as mt

    mt.use_inner_optimizer("fused")
    stack = functools.partial(stack_of_layers, layers=options.layers, hidden=options.hidden)
    model, optimizer = mt.build(make_model=stack)
    mt.step(model, optimizer, 0)
    found: dict[str, Counter[str]] = {}
    for name, time in itertools.product(options.formats, ("first", "second")):
        folder = options.out / time / name
        with counted(folder) as found[f"{name}, save"]:
            mt.save(name, model, optimizer, folder)
        model, optimizer = mt.build(make_model=stack)
        with counted(folder) as found[f"{name}, load"]:
            mt.load(name, model, optimizer, folder)
    report(found, options.ranks)


def stack_of_layers(config: Any, dtype: torch.dtype, native_fp32: bool, *, layers: int, hidden: int) -> Any:
    """Linear layers: the first from 16 to `hidden`, the others from `hidden` to `hidden`."""
    from megatron.core.transformer.module import MegatronModule

    class Stack(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.a = torch.nn.Linear(16, hidden)
            self.more = torch.nn.ModuleList(torch.nn.Linear(hidden, hidden) for _ in range(layers - 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in (self.a, *self.more):
                x = torch.tanh(layer(x))
            return x

    return Stack().to(dtype)


# DeepSpeed: its own checkpoints, and the universal ones from the one-pass converter


def zero(options: argparse.Namespace) -> None:
    from ckpt_patches.demo import deepspeed_training

    for work in (save_zero, load_zero):
        options.work = work
        deepspeed_training.on_ranks(options)
        for stage in options.stages if work is save_zero else ():
            folders = ["--input_folder", options.out / stage / TAG, "--output_folder", options.out / stage / UNIVERSAL]
            subprocess.run([sys.executable, "-m", "deepspeed_patches.ds_to_universal", *folders], check=True)
    files = [options.out / f"{work.__name__}.json" for work in (save_zero, load_zero)]
    print("\n" + json.dumps({part: rows for file in files for part, rows in json.loads(file.read_text()).items()}))


def save_zero(rank: int, options: argparse.Namespace) -> None:
    found = {}
    for stage in options.stages:
        run = zero_run(options, stage, universal=False)
        for folder in (options.out / "first" / stage, options.out / stage):
            with counted(folder) as found[f"stage {stage}, save"]:
                run.save_checkpoint(str(folder), tag=TAG, client_state=CLIENT_STATE)
    report(found, options.ranks, (options.out / "save_zero.json").write_text)


def load_zero(rank: int, options: argparse.Namespace) -> None:
    found = {}
    for stage in options.stages:
        for tag in (TAG, UNIVERSAL):
            run = zero_run(options, stage, universal=tag == UNIVERSAL)
            name = f"stage {stage}, {'universal ' if tag == UNIVERSAL else ''}load"
            for _ in range(2):
                with counted(options.out / stage) as found[name]:
                    run.load_checkpoint(str(options.out / stage), tag=str((options.out / stage / tag).resolve()))
    report(found, options.ranks, (options.out / "load_zero.json").write_text)


def zero_run(options: argparse.Namespace, stage: str, *, universal: bool) -> Any:
    """An engine after one step, with two param groups; each layer has a parameter in both."""
    import deepspeed

    layers = [torch.nn.Linear(16, options.hidden)]
    layers += [torch.nn.Linear(options.hidden, options.hidden) for _ in range(options.layers - 1)]
    groups = [{"params": [layer.weight for layer in layers]}, {"params": [layer.bias for layer in layers]}]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": int(stage), "reduce_bucket_size": 1 << 20},
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    run = deepspeed.initialize(model=torch.nn.Sequential(*layers), optimizer=optimizer, config=config)[0]
    run.backward(run(torch.ones(4, 16, dtype=torch.bfloat16)).float().pow(2).mean())
    run.step()
    return run


# The tools, and upstream's converter


def tool(options: argparse.Namespace) -> None:
    """Run the tool in this process; with one worker it does everything itself."""
    sys.argv = [options.module, *options.arguments]
    with counted(options.out) as counts:
        try:
            runpy.run_module(options.module, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    print("\n" + json.dumps({"tool": [counts]}))


if __name__ == "__main__":
    main()
