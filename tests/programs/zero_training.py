"""Train a tiny model with the real DeepSpeed on CPU ranks: write checkpoints, or resume from one.

    write OUT --ranks 8 KIND...        OUT/KIND/global_step2, and beside it truth.pt, losses.json, settings.json, end.pt
    resume FOLDER TAG KIND --ranks 4   prints the state after the load against truth.pt, and the losses from there

settings.json has the param groups' settings and the steps, at the save and at the end; a resume prints its own, and
what of its last state is not that of end.pt. A `write --universal FOLDER` begins with that universal checkpoint, of
STEPS steps; a resume from what it wrote is `--first 4`. `--node N` is for N ranks on a node.

The no-decay group has 11 elements; on 8 ranks it is padded to 16, 2 a rank: the padding, 5, reaches over 3 ranks.
Every rank sees its share of the same 16 samples a step, so runs with different numbers of ranks are comparable.
Another program takes the parts: `engine`, `train`, `state`, and `on_ranks`, which runs them.
"""

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch._dynamo  # by an optimizer, in every rank again, if it is not there by then
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

_all_gather_into_tensor = torch.distributed.all_gather_into_tensor


def prepare() -> None:
    """Let DeepSpeed train on a CPU, without a compiler, and without a race of its own."""
    # On a CPU, DeepSpeed would compile its shared-memory operator at run time; a test needs no compiler.
    deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))
    # Up to 0.14.0 it would compile oneCCL as well; and up to 0.15 it trains in fp16 on a GPU only.
    get_accelerator()._communication_backend_name = "gloo"
    get_accelerator().is_fp16_supported = lambda: True
    torch.distributed.all_gather_into_tensor = gather_and_wait


def gather_and_wait(*args: Any, **kwargs: Any) -> Any:
    """Up to 0.19.7 stage 3 starts many gathers, and waits for the last of them alone.

    NCCL ends them in their order. Gloo has two threads: one gather in fifty was not done then, and now and then a step
    began with parameters that were not there yet.
    """
    work = _all_gather_into_tensor(*args, **kwargs)
    if work is not None:
        work.wait()
    return work


HIDDEN = 3
SAMPLES = 16
STEPS = 2  # before the checkpoint, and again after it
TAG = "global_step2"

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}  # a scale at which no step overflows and is skipped


def zero(stage: int, **more: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, **more}}  # by default it takes 1 GB


KINDS: dict[str, dict[str, Any]] = {
    "stage1": {**BF16, **zero(1)},
    # fp32 gradient accumulation at stage 1 selects BF16_Optimizer, the writer of the DP=768 report
    "bf16_optimizer": {**BF16, **zero(1), "data_types": {"grad_accum_dtype": "fp32"}},
    "stage2": {**BF16, **zero(2)},
    "stage3": {**BF16, **zero(3)},
    "stage1_fp16": {**FP16, **zero(1)},
    "stage2_fp16": {**FP16, **zero(2)},
    "stage3_fp16": {**FP16, **zero(3)},
    "stage3_groups": {**BF16, **zero(3, sub_group_size=4)},
    "stage3_sub_groups": {**BF16, **zero(3, sub_group_size=4)},
    "stage3_frozen": {**BF16, **zero(3)},  # the norm is
}
# Before 0.18 the converter reads the first group only.
ONE_GROUP = ("stage3", "stage3_fp16", "stage3_sub_groups", "stage3_frozen")


class Tiny(torch.nn.Module):
    """12 elements with weight decay, 11 without."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = torch.nn.Linear(HIDDEN, HIDDEN)
        self.ln = torch.nn.LayerNorm(HIDDEN)
        self.w2 = torch.nn.Linear(HIDDEN, 1)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.w2(self.ln(torch.tanh(self.w1(x)))) * self.scale
        return output


def engine(kind: str, ranks: int, universal: bool) -> Any:
    gc.freeze()  # DeepSpeed collects garbage up to twenty times while it sets up; what was imported is none
    torch.manual_seed(0)
    model = Tiny()
    model.ln.requires_grad_(kind != "stage3_frozen")
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if kind in ONE_GROUP:
        groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // ranks,
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
        **KINDS[kind],
    }
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)[0]


def train(run: Any, rank: int, ranks: int, first: int) -> list[float]:
    """The mean loss of every step."""
    losses = []
    dtype = next(run.module.parameters()).dtype
    for step in range(first, first + STEPS):
        samples = torch.randn(SAMPLES, HIDDEN, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = (run(samples.chunk(ranks)[rank]).float() - 1).pow(2).mean()
        run.backward(loss)
        with torch.no_grad():  # 0.12 gathers the parameters into views, outside of it
            run.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / ranks)
    return losses


def state(run: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The live master parameters and moments, whole; gathered from the running optimizer, not from any file."""
    parameters = {name: p for name, p in run.module.named_parameters() if p.requires_grad}
    optimizer = run.optimizer
    if hasattr(optimizer, "single_partition_of_fp32_groups"):  # stage 1 and 2
        return flattened_state(optimizer, {parameter: name for name, parameter in parameters.items()})
    return {
        name: {
            "fp32": safe_get_full_fp32_param(parameter).clone(),
            "exp_avg": safe_get_full_optimizer_state(parameter, "exp_avg").clone(),
            "exp_avg_sq": safe_get_full_optimizer_state(parameter, "exp_avg_sq").clone(),
        }
        for name, parameter in parameters.items()
    }


def flattened_state(optimizer: Any, names: dict[torch.Tensor, str]) -> dict[str, dict[str, torch.Tensor]]:
    """Put every group's equal partitions together again, and cut them by the parameters' sizes."""
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names.values()}
    for master, parameters in zip(
        optimizer.single_partition_of_fp32_groups, optimizer.round_robin_bit16_groups, strict=True
    ):
        own = {"fp32": master.detach(), **optimizer.optimizer.state[master]}
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            partitions = [torch.empty_like(own[key]) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(partitions, own[key].contiguous())
            flat = torch.cat(partitions)
            for parameter in parameters:
                states[names[parameter]][key] = flat[: parameter.numel()].view(parameter.shape).clone()
                flat = flat[parameter.numel() :]
    return states


def settings(run: Any) -> dict[str, Any]:
    """What the inner optimizer knows beside its flat tensors: each group's settings, and each flat tensor's step."""
    inner = run.optimizer.optimizer
    return {
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups],
        "steps": [float(own["step"]) for own in inner.state.values() if "step" in own],
    }


def not_equal(expected: dict[str, dict[str, torch.Tensor]], found: dict[str, dict[str, torch.Tensor]]) -> list[str]:
    return [f"{n}.{key}" for n, states in expected.items() for key in states if not found[n][key].equal(states[key])]


def write(rank: int, args: argparse.Namespace) -> None:
    for kind in args.kinds:
        first = STEPS if args.universal else 0
        run = engine(kind, args.ranks, universal=bool(args.universal))
        if args.universal:
            run.load_checkpoint(str(args.universal.parent), tag=args.universal.name)
        train(run, rank, args.ranks, first=first)
        info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
        run.save_checkpoint(str(args.folder / kind), tag=TAG, client_state={**info, "iteration": STEPS})
        truth, set_to = state(run), [settings(run)]
        losses = train(run, rank, args.ranks, first=first + STEPS)
        set_to.append(settings(run))
        end = state(run)
        if rank == 0:
            torch.save(truth, args.folder / kind / "truth.pt")
            torch.save(end, args.folder / kind / "end.pt")
            (args.folder / kind / "losses.json").write_text(json.dumps(losses))
            (args.folder / kind / "settings.json").write_text(json.dumps(set_to))


def resume(rank: int, args: argparse.Namespace) -> None:
    run = engine(args.kind, args.ranks, universal=args.tag != TAG)
    run.load_checkpoint(str(args.folder), tag=args.tag)
    result: dict[str, Any] = {"different": not_equal(torch.load(args.folder / "truth.pt"), state(run))}
    set_to = [settings(run)]
    result["losses"] = train(run, rank, args.ranks, first=args.first)
    result["settings"] = [*set_to, settings(run)]
    result["different_end"] = not_equal(torch.load(args.folder / "end.pt"), state(run))
    if rank == 0:
        args.result.write_text(json.dumps(result))


def rank_main(rank: int, port: int, args: argparse.Namespace) -> None:
    node = getattr(args, "node", None) or args.ranks
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank % node))
    os.environ.update(WORLD_SIZE=str(args.ranks), LOCAL_SIZE=str(node))
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    args.work(rank, args)
    torch.distributed.barrier()
    os._exit(0)  # Gloo and DeepSpeed leave threads behind


def free_port() -> int:
    """Below those that Linux gives to connections: between here and its use another program's may get one of these."""
    while True:
        port = random.SystemRandom().randrange(10000, 32768)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def on_ranks(args: argparse.Namespace) -> None:
    """Run `args.work(rank, args)` on `args.ranks` processes, and wait for them."""
    port = free_port()
    prepare()
    # Forked, so that torch and DeepSpeed are imported once and not by every rank.
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(rank, port, args)) for rank in range(args.ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    failed = [process.exitcode for process in ranks if process.exitcode]
    assert not failed, failed


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    writing = commands.add_parser("write")
    writing.set_defaults(work=write)
    writing.add_argument("folder", type=Path)
    writing.add_argument("kinds", nargs="+", choices=KINDS)
    writing.add_argument("--universal", type=Path, metavar="FOLDER")
    resuming = commands.add_parser("resume")
    resuming.set_defaults(work=resume)
    resuming.add_argument("folder", type=Path)
    resuming.add_argument("tag")
    resuming.add_argument("kind", choices=KINDS)
    resuming.add_argument("--first", type=int, default=STEPS)
    for command in (writing, resuming):
        command.add_argument("--ranks", type=int, default=8)
        command.add_argument("--node", type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args.result = Path(folder, "resumed.json")
        on_ranks(args)
        print(args.result.read_text() if args.work is resume else "{}")


if __name__ == "__main__":
    main()
