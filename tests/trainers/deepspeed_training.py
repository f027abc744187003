"""Small training runs with the real DeepSpeed on CPU ranks, for saves, resumes and conversions.

The no-decay group of `engine` has 11 elements; on 8 ranks it is padded to 16, 2 per rank: the padding, 5 elements,
spans 3 ranks. Every rank gets its share of the same 16 samples per step, so runs with different numbers of ranks are
comparable.
"""

import functools
import gc
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch._dynamo  # else an optimizer imports it on every rank
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import ds_to_universal

from trainers import deepspeed_state, judge
from trainers.deepspeed_state import inner_optimizer
from trainers.deepspeed_state import is_weight as is_weight
from trainers.deepspeed_state import kind_of as kind_of
from trainers.deepspeed_state import names_of as names_of
from trainers.gpu import REAL_GPU, share_gpu
from trainers.judge import on_any_rank as on_any_rank
from trainers.ranks import free_port
from trainers.ranks import gathered as gathered
from trainers.ranks import results as run_ranks

# All that the next steps depend on: full weights, main parameters and moments, and other state.
snapshot = deepspeed_state.live
groups_in_memory = deepspeed_state.groups
differences, same = judge.different, judge.alike
_all_gather_into_tensor = torch.distributed.all_gather_into_tensor


def prepare() -> None:
    """Let DeepSpeed train on a CPU, without a compiler, and without DeepSpeed's own race."""
    # On a CPU, DeepSpeed would compile its shared-memory operator at run time; tests must not need a compiler.
    deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))
    # It would also use oneCCL, if that is installed; up to 0.15 it trains in fp16 only on a GPU.
    if REAL_GPU:
        return
    get_accelerator()._communication_backend_name = "gloo"
    get_accelerator().is_fp16_supported = lambda: True
    torch.distributed.all_gather_into_tensor = gather_and_wait


def gather_and_wait(*args: Any, **kwargs: Any) -> Any:
    """Wait for each gather: up to 0.19.7 stage 3 starts many gathers, and waits only for the last one.

    NCCL completes them in order. Gloo has two threads: one gather in fifty was incomplete, and some steps began
    without all parameters.
    """
    work = _all_gather_into_tensor(*args, **kwargs)
    if work is not None:
        work.wait()
    return work


Make = Callable[..., Any]  # a run, given `universal` (whether it loads such a checkpoint) and `seed`
States = Callable[[Any], dict[str, Any]]  # of a run

HIDDEN = 3
MOMENTS = ("exp_avg", "exp_avg_sq")
SAMPLES = 16
STEPS = 2  # before the checkpoint, and again after it
TAG = "global_step2"
UNIVERSAL, TRUTH = "universal", "truth.pt"
RANK_ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}  # a scale at which no step overflows and is skipped


def zero(stage: int, **more: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, **more}}  # the default needs 1 GB


FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
KINDS: dict[str, dict[str, Any]] = {
    "stage0": {**BF16, **zero(0)},
    "stage0_fp32_gradients": {**BF16, **zero(0), **FP32_GRADIENTS},
    "pipeline": {**BF16, **zero(0), "gradient_accumulation_steps": 2},  # with one stage
    "stage0_fp16": {**FP16, **zero(0)},
    "stage1": {**BF16, **zero(1)},
    # fp32 gradient accumulation at stage 1 selects BF16_Optimizer, as in the DP=768 report
    "bf16_optimizer": {**BF16, **zero(1), **FP32_GRADIENTS},
    "stage2": {**BF16, **zero(2)},
    "stage1_round_robin": {**BF16, **zero(1, round_robin_gradients=True)},
    "stage2_round_robin": {**BF16, **zero(2, round_robin_gradients=True)},
    "stage3": {**BF16, **zero(3)},
    "stage3_writer": {**BF16, **zero(3), "checkpoint": {"writer": {"type": "python"}}},
    "stage3_decoupled": {**BF16, **zero(3), "checkpoint": {"writer": {"type": "python", "decoupled": True}}},
    "stage1_fp16": {**FP16, **zero(1)},
    "stage2_fp16": {**FP16, **zero(2)},
    "stage3_fp16": {**FP16, **zero(3)},
    "stage3_groups": {**BF16, **zero(3, sub_group_size=4)},
    "stage3_sub_groups": {**BF16, **zero(3, sub_group_size=4)},
    "stage3_frozen": {**BF16, **zero(3)},  # the norm is frozen
    # Parameters below the threshold (default: 100,000 elements) are gathered once and from all ranks.
    "stage3_hpz": {
        **BF16,
        **zero(3, zero_hpz_partition_size=2, stage3_param_persistence_threshold=0, stage3_max_reuse_distance=0),
    },
}
# Before 0.18 the converter reads only the first group.
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


def engine_of(case: str, ranks: int, universal: bool, seed: int = 0, **more: Any) -> Any:
    """A run of a case: a kind and the number of param groups, e.g. `stage1-2`, or a kind. `more` is in each group."""
    torch.manual_seed(seed)
    kind, _, number = case.rpartition("-") if "-" in case else (case, "", "1" if case in ONE_GROUP else "2")
    tiny = Tiny()
    tiny.ln.requires_grad_(kind != "stage3_frozen")
    model = deepspeed.PipelineModule(layers_of(tiny), num_stages=1, loss_fn=loss) if kind == "pipeline" else tiny
    groups = [{**group, **more} for group in param_groups(model, tiny.scale, int(number))]
    return initialize(kind, ranks, model, groups, universal)


def param_groups(model: Any, scale: torch.Tensor, number: int) -> list[dict[str, Any]]:
    """One to three groups with different learning rates and weight decays; the third has one element, `scale`."""
    if number == 1:
        return [{"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": 0.01}]
    others = [p for p in model.parameters() if p.dim() <= 1 and not (number == 3 and p is scale)]
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01, "lr": 1e-2},
        {"params": others, "weight_decay": 0.0, "lr": 3e-3},
        {"params": [scale], "weight_decay": 0.0, "lr": 1e-3},
    ]
    return groups[:number]


def layers_of(model: Tiny) -> list[torch.nn.Module]:
    return [model.w1, torch.nn.Tanh(), model.ln, model.w2]


def loss(output: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (output.float() - expected.float()).pow(2).mean()


def initialize(kind: str, ranks: int, model: Any, groups: list[dict[str, Any]], universal: bool) -> Any:
    gc.freeze()  # DeepSpeed's setup collects garbage up to twenty times; skip imported objects
    settings = config(SAMPLES // ranks, universal, KINDS[kind])
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=settings)[0]


def config(samples: int, universal: bool, *parts: dict[str, Any]) -> dict[str, Any]:
    """A configuration of DeepSpeed, for micro-batches of so many samples, with these parts."""
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": samples,
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
    }
    for part in parts:
        found |= part
    return found


def train(run: Any, rank: int, ranks: int, first: int) -> list[float]:
    """The mean loss of every step."""
    if hasattr(run, "grid"):
        return train_pipeline(run, rank, ranks, first)
    losses = []
    dtype = next(run.module.parameters()).dtype
    for step in range(first, first + STEPS):
        samples = torch.randn(SAMPLES, HIDDEN, generator=torch.Generator().manual_seed(step)).to(run.device, dtype)
        loss = (run(samples.chunk(ranks)[rank]).float() - 1).pow(2).mean()
        run.backward(loss)
        with torch.no_grad():  # with grad enabled, 0.12 gathers into views
            run.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / ranks)
    return losses


def train_pipeline(run: Any, rank: int, ranks: int, first: int) -> list[float]:
    losses = []
    for step in range(first, first + STEPS):
        samples = torch.randn(2 * SAMPLES, HIDDEN, generator=torch.Generator().manual_seed(step)).bfloat16()
        micro_batches = samples.chunk(2 * ranks)[rank::ranks]
        losses.append(float(run.train_batch(iter([(batch, torch.ones(len(batch), 1)) for batch in micro_batches]))))
    return losses


def state(run: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The full main parameters and moments in memory, by parameter."""
    found = snapshot(run)
    return {
        name: {
            key: found[f"{name}.{key}"].view(getattr(parameter, "ds_shape", parameter.shape))
            for key in ("fp32", *MOMENTS)
        }
        for parameter, name in names_of(run).items()
        if f"{name}.fp32" in found
    }


def cut(flat: torch.Tensor, parameters: Iterable[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """The parameters and their elements, which are one after another in a flat tensor."""
    at = 0
    for parameter in parameters:
        yield parameter, flat[at : at + parameter.numel()].view(parameter.shape).clone()
        at += parameter.numel()


def groups_of(run: Any) -> list[dict[str, Any]]:
    """The inner optimizer's param groups."""
    groups: list[dict[str, Any]] = inner_optimizer(run).param_groups
    return groups


def flat_groups(run: Any) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """This rank's partition of each group's flat main parameters, and the group's parameters."""
    return [(main, parameters) for main, parameters, _ in groups_in_memory(run, inner_optimizer(run))]


def reduce_as_on_a_gpu() -> None:
    """Let the engine reduce 16-bit gradients itself, as it does without ZeRO and for BF16_Optimizer.

    Up to 0.16 it reduces only dtypes that the accelerator lists, and a CPU does not list fp16.
    """
    if REAL_GPU:
        return
    get_accelerator().supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("+")[0].split("."))


def save(run: Any, folder: Path) -> None:
    """Save as TAG in a folder, so that it can be converted."""
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    run.save_checkpoint(str(folder), tag=TAG, client_state={**info, "iteration": STEPS})


def load(run: Any, folder: Path, tag: str, **asked: bool) -> Any:
    """Load a checkpoint. Returns the client state."""
    return run.load_checkpoint(str(folder), tag=tag, **asked)[1]


def resumed(case: str, folder: Path, *, ranks: int = 2, node: int | None = None, universal: bool = False) -> str:
    """What differs after a resume, with `universal` from a universal checkpoint, in words; see `resume`."""
    make = functools.partial(engine_of, case, ranks)
    tags = [UNIVERSAL if universal else TAG]
    return str(results(resume, ranks, folder, ranks, make, tags, node=node)[0])


def resume(rank: int, folder: Path, ranks: int, make: Make, tags: Sequence[str], states: States = snapshot) -> str:
    """Train, save, load each tag into a new run with other weights, and take two steps in both runs.

    Returns how many `states` differ after the load and after the steps, in words, or "" if none.
    """
    run = make(universal=False, seed=0)
    saved, end = save_and_go_on(run, rank, folder, ranks, states)
    for tag in tags:
        if tag == UNIVERSAL:
            convert(folder)
        resumed = make(universal=tag == UNIVERSAL, seed=1)
        load(resumed, folder, tag)
        loaded = on_any_rank(differences(states(resumed), saved))
        train(resumed, rank, ranks, first=STEPS)
        trained = on_any_rank(differences(states(resumed), end))
        if loaded or trained:
            counts = f"{len(loaded)} of {len(saved)} states differ after the load, {len(trained)} after {STEPS} steps"
            return f"{counts} more, and no error"
    return ""


def weights_alone(folder: Path, *cases: str, **options: bool) -> str:
    """What is wrong after a load of only the weights of a checkpoint that is not the latest, on 2 and on 3 ranks.

    `options` are passed to `load_checkpoint`.
    """
    allow_pickles()
    found = {
        case: results(load_weights, ranks, folder / case / str(ranks), case, ranks, options)[0]
        for ranks in (2, 3)
        for case in cases
    }
    return "; ".join(f"{case}: {wrong}" for case, wrong in found.items() if wrong)


def load_weights(rank: int, folder: Path, case: str, ranks: int, options: dict[str, bool]) -> str:
    """Save twice, and load the first checkpoint's weights into a run with other weights. Returns what is wrong."""
    run = engine_of(case, ranks, universal=False, seed=0)
    train(run, rank, ranks, first=0)
    run.save_checkpoint(str(folder), tag=TAG)
    saved = snapshot(run)
    train(run, rank, ranks, first=STEPS)
    run.save_checkpoint(str(folder), tag="later")
    loaded = engine_of(case, ranks, universal=False, seed=1)
    loaded.load_checkpoint(str(folder), tag=TAG, **options)
    found = snapshot(loaded)
    names = [name for name in saved if kind_of(name) == "weight"]
    wrong = on_any_rank([name for name in names if not same(found[name], saved[name])])
    stale = on_any_rank([name for name in found if kind_of(name) == "fp32" and not is_weight(found, name)])
    if not wrong and not stale:
        return ""
    return f"{len(wrong)} of {len(names)} weights are not those saved, {len(stale)} masters not the weights; no error"


def universal_weights_alone(folder: Path, *cases: str) -> str:
    """What is wrong after a load of only the weights of a universal checkpoint, on 2 and on 3 ranks."""
    allow_pickles()
    found = [
        results(load_universal_weights, ranks, folder / case / str(ranks), case, ranks)[0]
        for ranks in (2, 3)
        for case in cases
    ]
    return next(filter(None, found), "")


def load_universal_weights(rank: int, folder: Path, case: str, ranks: int) -> str:
    """Load only the weights into a new run. Returns wrong weights and unexpected changes, or "" if none."""
    saved, _ = train_and_save(rank, folder, case, ranks)
    convert(folder)
    for asked in ({"load_optimizer_states": False}, {"load_module_only": True}):
        run = engine_of(case, ranks, universal=True, seed=1)
        before = snapshot(run)
        run.load_checkpoint(str(folder), tag=UNIVERSAL, **asked)
        found = snapshot(run)
        expected = {**saved, **{name: value for name, value in before.items() if kind_of(name) in ("group", "steps")}}
        compared = [name for name in found if kind_of(name) in ("weight", "fp32", "group", "steps")]
        wrong = on_any_rank([name for name in compared if not same(found[name], expected[name])])
        if wrong := wrong + [name for name in found if kind_of(name) == "state"]:
            return f"{next(iter(asked))}: {wrong} are not as asked for; no error"
    return ""


def train_and_save(rank: int, folder: Path, case: str, ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train and save. Returns the state at the save, and the state STEPS steps later."""
    run = engine_of(case, ranks, universal=False, seed=0)
    return save_and_go_on(run, rank, folder, ranks, snapshot)


def save_and_go_on(
    run: Any, rank: int, folder: Path, ranks: int, states: States
) -> tuple[dict[str, Any], dict[str, Any]]:
    train(run, rank, ranks, first=0)
    for group in groups_of(run):
        group["lr"] /= 2  # as a scheduler would, so that it differs from the next run's initial value
    save(run, folder)
    saved = states(run)
    train(run, rank, ranks, first=STEPS)
    return saved, states(run)


def convert(folder: Path, *more: str) -> None:
    """Convert TAG to the universal checkpoint UNIVERSAL, on rank 0 with this project's converter."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        alone = {name: value for name, value in os.environ.items() if name not in RANK_ENVIRONMENT}
        options = ["--input_folder", str(folder / TAG), "--output_folder", str(folder / UNIVERSAL)]
        command = [sys.executable, "-m", "deepspeed_patches.ds_to_universal", *options, *more]
        done = subprocess.run(command, env=alone, text=True, capture_output=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr}")
    torch.distributed.barrier()


def trained_and_converted(case: str, folder: Path, ranks: int) -> str:
    """How many states differ after a conversion with DeepSpeed's converter, in words; see `converted`."""
    results(train_and_keep, ranks, folder, case, ranks)
    return converted(folder)


def train_and_keep(rank: int, folder: Path, case: str, ranks: int) -> None:
    run = engine_of(case, ranks, universal=False, seed=0)
    train(run, rank, ranks, first=0)
    save_and_keep(run, folder)


def save_and_keep(run: Any, folder: Path) -> None:
    """Save a checkpoint, and the live state as TRUTH."""
    save(run, folder)
    live = state(run)
    if torch.distributed.get_rank() == 0:
        torch.save(live, folder / TRUTH)


def converted(folder: Path, *, handed_over: bool = False) -> str:
    """Convert TAG as `convert_by_upstream` does. Returns how many states differ from TRUTH, or "" if none.

    Raises:
        RankError: the converter raised an error.
    """
    run_ranks(convert_by_upstream, 1, folder / TAG, folder / UNIVERSAL, 2, handed_over)
    truth, found = torch.load(folder / TRUTH, map_location="cpu"), universal_states(folder / UNIVERSAL)
    pairs = [(live, found[name][key]) for name, states in truth.items() for key, live in states.items()]
    different = sum(not live.flatten().equal(other.flatten()) for live, other in pairs)  # ZeRO-3 states are flat
    return f"{different} of {len(pairs)} states differ, and no error" if different else ""


def convert_by_upstream(rank: int, source: Path, output: Path, workers: int = 2, handed_over: bool = False) -> None:
    """Convert with DeepSpeed's own converter; with `handed_over`, with the one that the switches say."""
    if not handed_over:
        os.environ["CKPT_PATCHES_SKIP"] = f"{os.environ.get('CKPT_PATCHES_SKIP', '')},universal_converter"
    sys.argv = ["ds_to_universal", "--input_folder", str(source), "--output_folder", str(output)]
    sys.argv += ["--num_extract_workers", str(workers), "--num_merge_workers", str(workers)]
    if inspect.signature(ds_to_universal.main).parameters:
        ds_to_universal.main(ds_to_universal.parse_arguments())
    else:  # up to 0.14 it parses the arguments itself
        ds_to_universal.main()


def universal_states(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The states in a universal checkpoint, by parameter."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    for parameter in sorted(path for path in (folder / "zero").iterdir() if path.is_dir()):
        loaded = {key: torch.load(parameter / f"{key}.pt") for key in ("fp32", *MOMENTS)}
        states[parameter.name] = {key: v["param"] if isinstance(v, dict) else v for key, v in loaded.items()}
    return states


def allow_pickles() -> None:
    """Work around another bug, `torch_load_weights_only`: up to 0.15.4 no checkpoint loads with torch 2.6 or later."""
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"


def results(worker: Callable[..., Any], ranks: int, *args: object, node: int | None = None) -> list[Any]:
    """The return values of `worker(rank, *args)`, one per rank. `node` is the number of ranks per node (default: all).

    Raises:
        RankError: a rank raised an error.
    """
    prepare()
    reduce_as_on_a_gpu()
    return run_ranks(_start, ranks, worker, ranks, node or ranks, free_port(), *args)


def _start(rank: int, worker: Callable[..., Any], ranks: int, node: int, port: int, *args: object) -> Any:
    join(rank, ranks, node, port)
    result = worker(rank, *args)
    torch.distributed.barrier()
    if REAL_GPU:
        torch.distributed.destroy_process_group()  # NCCL aborts a rank whose neighbor ends first
    return result


def join(rank: int, ranks: int, node: int, port: int) -> None:
    """Make this process a rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank % node))
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_SIZE=str(node))
    if REAL_GPU:
        os.environ["LOCAL_RANK"] = "0"
        share_gpu(rank)
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="nccl" if REAL_GPU else "gloo", verbose=False)
