"""Save and load with the real packages on CPU ranks, and count what each rank does; prints JSON, by part and rank.

    counting.py zarr OUT --ranks 4 --chunks 16        flattened shards, of which each tensor-parallel rank has a chunk
    counting.py megatron OUT --ranks 4 --formats torch,fully_reshardable [--layers 2] [--hidden 64]
                    [--steps 0] [--background] [--offload 0.5] [--schedule override|checkpoint]
    counting.py reload OUT --ranks 4 --offload 0.5    the optimizer of a run of which the weights alone were loaded
    counting.py zero OUT --ranks 4 --stages 0,1,3 [--layers 2] [--hidden 64]
                    [--experts 4 [--expert-parallel 2]]
    counting.py tool OUT MODULE ARGUMENT...           a command, of files in OUT

What is done is done twice: the first time modules are imported and connections opened, the second time is counted.
"""

import argparse
import functools
import inspect
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
# What Megatron-DeepSpeed adds, and the converter asks for.
CLIENT_STATE = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}, "iteration": 1}


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    for start in (zarr, megatron, reload, zero):
        command = commands.add_parser(start.__name__)
        command.set_defaults(start=start)
        command.add_argument("out", type=Path)
        command.add_argument("--ranks", type=int, required=True)
        command.add_argument("--chunks", type=int, default=16)
        command.add_argument("--formats", type=lambda text: text.split(","), default=[])
        command.add_argument("--stages", type=lambda text: text.split(","), default=[])
        command.add_argument("--layers", type=int, default=2)
        command.add_argument("--hidden", type=int, default=64)
        command.add_argument("--background", action="store_true", help="save asynchronously, and wait for the end")
        command.add_argument("--steps", type=int, default=1, help="before the first save")
        command.add_argument("--offload", type=float, help="the fraction of the parameters that the CPU steps")
        command.add_argument("--schedule", help="whose learning rate holds after a load")
        command.add_argument("--experts", type=int, default=0, help="behind a layer")
        command.add_argument("--expert-parallel", type=int, default=2, help="ranks")
    command = commands.add_parser("tool")
    command.set_defaults(start=tool)
    command.add_argument("out", type=Path)
    command.add_argument("module")
    command.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.start(options)


def report(found: Found, ranks: int, write: Callable[[str], object] = print) -> None:
    """Of every part the counts of each rank, from rank 0."""
    by_rank: list[Any] = [None] * ranks
    dist.all_gather_object(by_rank, found)
    if dist.get_rank() == 0:
        write(json.dumps({part: [one[part] for one in by_rank] for part in found}))


# megatron-core, the zarr strategy alone


def zarr(options: argparse.Namespace) -> None:
    from ckpt_patches.demo import zarr_saving

    zarr_saving.spawn(save_chunks, options.ranks, options)


def save_chunks(rank: int, options: argparse.Namespace) -> None:
    """One array, `ranks` chunks of which are a tensor's; and as many tensors as it takes."""
    from megatron.core.dist_checkpointing.strategies import zarr as strategy

    from ckpt_patches.demo import zarr_saving

    ranks, rows = options.ranks, 4
    # The two data-parallel ranks of a pair have the same chunks: as many tensor-parallel ranks as pairs.
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


# megatron-core, whole checkpoints


def megatron(options: argparse.Namespace) -> None:
    from ckpt_patches.demo import megatron_training as mt

    mt.spawn(save_and_load, options.ranks, options)


def save_and_load(rank: int, options: argparse.Namespace) -> None:
    from ckpt_patches.demo import megatron_training as mt

    build = builder(options)
    model, optimizer = build()
    scheduler = schedule(optimizer, options, lr=1e-3)
    for iteration in range(options.steps):
        mt.step(model, optimizer, iteration)
    found: dict[str, Counter[str]] = {}
    for name, time in itertools.product(options.formats, ("first", "second")):
        folder = options.out / time / name
        if options.background:
            with counted(folder) as found[f"{name}, save in the background"]:
                save_in_background(name, model, optimizer, folder)
            continue
        with counted(folder) as found[f"{name}, save"]:
            mt.save(name, model, optimizer, folder)
        model, optimizer = build()
        resumed_with = schedule(optimizer, options, lr=5e-4)
        with counted(folder) as found[f"{name}, load"]:
            mt.load(name, model, optimizer, folder)
            if scheduler:
                resumed_with.load_state_dict(scheduler.state_dict())
    report(found, options.ranks)


def builder(options: argparse.Namespace) -> Callable[[], tuple[Any, Any]]:
    """What makes a model and its optimizer."""
    from ckpt_patches.demo import megatron_training as mt

    mt.use_inner_optimizer("fused")
    stack = functools.partial(stack_of_layers, layers=options.layers, hidden=options.hidden)
    return functools.partial(mt.build, make_model=stack, offload_fraction=options.offload)


def schedule(optimizer: Any, options: argparse.Namespace, lr: float) -> Any:
    """A scheduler; none where none is asked for."""
    import param_groups

    if options.schedule:
        return param_groups.schedule(optimizer, {"lr": lr, "min_lr": lr / 10}, {"keep": options.schedule})
    return None


def reload(options: argparse.Namespace) -> None:
    from ckpt_patches.demo import megatron_training as mt

    mt.spawn(reload_weights, options.ranks, options)


def reload_weights(rank: int, options: argparse.Namespace) -> None:
    _, optimizer = builder(options)()
    found: Found = {}
    for _ in range(2):
        with counted(options.out) as found["reload"]:
            optimizer.reload_model_params()
    report(found, options.ranks)


def save_in_background(name: str, model: Any, optimizer: Any, folder: Path) -> None:
    """What this process does for it; its writer is another one."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    from ckpt_patches.demo import megatron_training as mt

    mt.make_folder(folder)
    state = mt.sharded_state_dict(name, model, optimizer, is_loading=False)
    chosen: dict[str, Any] = {"async_sharded_save": True}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:  # since 0.17 another package's
        chosen["async_strategy"] = "mcore"
    calls = AsyncCallsQueue()
    calls.schedule_async_request(dist_checkpointing.save(state, str(folder), ("torch_dist", 1), **chosen))
    calls.maybe_finalize_async_calls(blocking=True)


def stack_of_layers(config: Any, dtype: torch.dtype, native_fp32: bool, *, layers: int, hidden: int) -> Any:
    """Linear layers, 16 to hidden, and from there on hidden to hidden."""
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


# DeepSpeed: checkpoints of its own, and the universal ones that the one-pass converter makes of them


def zero(options: argparse.Namespace) -> None:
    from ckpt_patches.demo import deepspeed_training

    for work in (save_zero, load_zero):
        options.work = work
        deepspeed_training.on_ranks(options)
        for stage in convertible(options.stages) if work is save_zero else ():
            folders = ["--input_folder", options.out / stage / TAG, "--output_folder", options.out / stage / UNIVERSAL]
            more = ["--inject_missing_state"] if options.experts else []
            subprocess.run([sys.executable, "-m", "deepspeed_patches.ds_to_universal", *folders, *more], check=True)
    files = [options.out / f"{work.__name__}.json" for work in (save_zero, load_zero)]
    print("\n" + json.dumps({part: rows for file in files for part, rows in json.loads(file.read_text()).items()}))


def convertible(stages: list[str]) -> list[str]:
    return [stage for stage in stages if stage != "0"]


def save_zero(rank: int, options: argparse.Namespace) -> None:
    found = {}
    for stage in options.stages:
        run = zero_run(options, stage, universal=False)
        for folder in (options.out / "first" / stage, options.out / stage):
            with counted(folder) as found[f"stage {stage}, save"]:
                # With experts a save adds by itself what the converter asks for, and takes no other.
                run.save_checkpoint(str(folder), tag=TAG, client_state={} if options.experts else CLIENT_STATE)
    report(found, options.ranks, (options.out / "save_zero.json").write_text)


def load_zero(rank: int, options: argparse.Namespace) -> None:
    from ckpt_patches.demo.deepspeed_training import OneTensorParallelRank

    found = {}
    for stage in options.stages:
        for tag in (TAG, UNIVERSAL) if convertible([stage]) else (TAG,):
            run = zero_run(options, stage, universal=tag == UNIVERSAL)
            name = f"stage {stage}, {'universal ' if tag == UNIVERSAL else ''}load"
            if tag == UNIVERSAL and stage != "3":  # up to 0.14.0 DeepSpeed cannot do without Megatron
                run.optimizer.mpu = OneTensorParallelRank
            for _ in range(2):
                with counted(options.out / stage) as found[name]:
                    run.load_checkpoint(str(options.out / stage), tag=str((options.out / stage / tag).resolve()))
    report(found, options.ranks, (options.out / "load_zero.json").write_text)


def zero_run(options: argparse.Namespace, stage: str, *, universal: bool) -> Any:
    """One that has taken a step, of two param groups in which every layer has a part.

    Up to 0.17 no universal checkpoint of stage 3 has more than one.
    """
    import deepspeed

    if options.experts:
        return run_of_experts(options, stage, universal=universal)
    layers = [torch.nn.Linear(16, options.hidden)]
    layers += [torch.nn.Linear(options.hidden, options.hidden) for _ in range(options.layers - 1)]
    model = torch.nn.Sequential(*layers)
    groups = [{"params": [layer.weight for layer in layers]}, {"params": [layer.bias for layer in layers]}]
    if stage == "3" and deepspeed.__version__ < "0.18":
        groups = [{"params": list(model.parameters())}]
    return stepped(model, groups, stage, universal=universal)


def run_of_experts(options: argparse.Namespace, stage: str, *, universal: bool) -> Any:
    """A layer, and experts of several."""
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(16, options.hidden)
            expert = torch.nn.Sequential(
                *(torch.nn.Linear(options.hidden, options.hidden) for _ in range(options.layers))
            )
            self.experts = MoE(
                options.hidden, expert, num_experts=options.experts, ep_size=options.expert_parallel, min_capacity=0
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.experts(self.first(x))[0]
            return found

    model = Model()
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    return stepped(model, groups, stage, universal=universal)


def stepped(model: torch.nn.Module, groups: list[dict[str, Any]], stage: str, *, universal: bool) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": int(stage), "reduce_bucket_size": 1 << 20},
    }
    run = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)[0]
    run.backward(run(torch.ones(4, 16, dtype=torch.bfloat16)).float().pow(2).mean())
    run.step()
    return run


# The tools, and upstream's converter


def tool(options: argparse.Namespace) -> None:
    """In this process: with one worker, so that it does all by itself."""
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
