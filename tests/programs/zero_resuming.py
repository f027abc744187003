"""Train and resume at every ZeRO stage with the real DeepSpeed on CPU ranks; print what came of it, as JSON by case.

    zero_resuming.py train FOLDER CASE... --ranks N
    zero_resuming.py resume FOLDER/CASE... --ranks M [--tag universal] [--spoil RANK] [--save NAME]

With `--save NAME` the run saves in the folder of that name in FOLDER/CASE at its end, with the client's state that it
has loaded. With `--node N` there are N ranks on a node. `--spoil` changes a weight of that rank after the load: it must
be found.
A case is a kind and the number of param groups: `stage1-2`. `train` saves in FOLDER/CASE/global_step2, goes on for two
steps more, and writes what the run held at the save and at the end beside it. `resume` loads that into a new run of
other weights, says what differs on any rank, and takes the same two steps; what it prints is by the folders as they
were given. A case in which a rank dies has the "error" of it, and what differs if it had loaded by then. Where the
settings of param groups alone differ, the two steps are taken with the right ones.
"""

import argparse
import copy
import gc
import json
import multiprocessing
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import zero_training
from own_files import OneTensorParallelRank
from zero_training import BF16, FP16, HIDDEN, SAMPLES, STEPS, TAG, Tiny, zero

MOMENTS = ("exp_avg", "exp_avg_sq")
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
KINDS: dict[str, dict[str, Any]] = {
    "stage0": {**BF16, **zero(0)},
    "stage0_fp32_gradients": {**BF16, **zero(0), **FP32_GRADIENTS},
    "pipeline": {**BF16, **zero(0), "gradient_accumulation_steps": 2},  # of one stage
    "stage0_fp16": {**FP16, **zero(0)},
    **{kind: zero_training.KINDS[kind] for kind in ("stage1", "bf16_optimizer", "stage1_fp16")},
    **{kind: zero_training.KINDS[kind] for kind in ("stage2", "stage2_fp16", "stage3", "stage3_fp16")},
}
# Of a rank that does not notice that another one has died.
PATIENCE = 20  # seconds


def engine(case: str, ranks: int, universal: bool, seed: int) -> Any:
    """A run whose groups, if there are two, differ in their learning rates and weight decays."""
    gc.freeze()  # see zero_training
    torch.manual_seed(seed)
    kind, _, groups = case.rpartition("-")
    model = deepspeed.PipelineModule(layers_of(Tiny()), num_stages=1, loss_fn=loss) if kind == "pipeline" else Tiny()
    chosen: list[dict[str, Any]] = [{"params": list(model.parameters()), "weight_decay": 0.01}]
    if groups == "2":
        chosen = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01, "lr": 1e-2},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
        ]
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // ranks,
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
        **KINDS[kind],
    }
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(chosen, lr=1e-2), config=config)[0]


def layers_of(model: Tiny) -> list[torch.nn.Module]:
    return [model.w1, torch.nn.Tanh(), model.ln, model.w2]


def loss(output: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (output.float() - expected.float()).pow(2).mean()


def train(run: Any, rank: int, ranks: int, first: int) -> list[float]:
    """The mean loss of every step."""
    if not hasattr(run, "grid"):
        return zero_training.train(run, rank, ranks, first)
    losses = []
    for step in range(first, first + STEPS):
        samples = torch.randn(2 * SAMPLES, HIDDEN, generator=torch.Generator().manual_seed(step)).bfloat16()
        micro_batches = samples.chunk(2 * ranks)[rank::ranks]
        losses.append(float(run.train_batch(iter([(batch, torch.ones(len(batch), 1)) for batch in micro_batches]))))
    return losses


def snapshot(run: Any) -> dict[str, Any]:
    """All that the next steps depend on: weights, masters and moments, whole, and what is not a tensor."""
    optimizer = run.optimizer
    if hasattr(optimizer, "fp16_partitioned_groups"):
        states = partitioned(run)
    elif hasattr(optimizer, "fp32_groups"):
        states = unflattened(run)
    else:
        states = flattened(run)
    inner = optimizer.optimizer
    for number, group in enumerate(groups_of(run)):
        states[f"group {number}"] = {key: value for key, value in group.items() if key != "params"}
    steps = {float(own["step"]) for own in inner.state.values() if "step" in own}
    states["steps"] = sorted(set().union(*gathered(steps)))
    states["counters"] = [run.global_steps, run.global_samples, run.skipped_steps]
    states["scale"] = [getattr(optimizer, "loss_scale", None), getattr(scaler_of(optimizer), "cur_iter", None)]
    return states


def groups_of(run: Any) -> list[dict[str, Any]]:
    """Those that the inner optimizer steps by."""
    groups: list[dict[str, Any]] = run.optimizer.optimizer.param_groups
    return groups


def scaler_of(optimizer: Any) -> Any:
    """Where an optimizer counts for its loss scale; without ZeRO it does so itself, or from 0.18.6 on in a record."""
    return getattr(optimizer, "loss_scaler", getattr(optimizer, "loss_scale_config", optimizer))


def partitioned(run: Any) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for name, parameter in run.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            states[f"{name}.weight"] = parameter.detach().clone()
        states[f"{name}.fp32"] = safe_get_full_fp32_param(parameter).clone()
        for key in MOMENTS:
            states[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return states


def unflattened(run: Any) -> dict[str, Any]:
    """Of stage 0, where every rank has all."""
    names, states = names_of(run), {}
    optimizer = run.optimizer
    for parameters, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for parameter, master in zip(parameters, masters, strict=True):
            own = {"weight": parameter, "fp32": master, **optimizer.optimizer.state[master]}
            for key in ("weight", "fp32", *MOMENTS):
                states[f"{names[parameter]}.{key}"] = own[key].detach().clone()
    return states


def flattened(run: Any) -> dict[str, Any]:
    """Put every group's equal partitions together again, and cut them by the parameters' sizes; not by the links."""
    names = names_of(run)
    states: dict[str, Any] = {f"{name}.weight": p.detach().clone() for p, name in names.items()}
    optimizer = run.optimizer
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        masters, groups = optimizer.single_partition_of_fp32_groups, optimizer.round_robin_bit16_groups
    else:  # BF16_Optimizer
        masters, groups = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups
    for master, parameters in zip(masters, groups, strict=True):
        own = {"fp32": master.detach(), **optimizer.optimizer.state.get(master, {})}
        for key in ("fp32", *MOMENTS):
            flat = torch.cat(gathered(own.get(key, torch.full_like(master, torch.nan)).clone()))
            for parameter in parameters:
                states[f"{names[parameter]}.{key}"] = flat[: parameter.numel()].view(parameter.shape).clone()
                flat = flat[parameter.numel() :]
    return states


def names_of(run: Any) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in run.module.named_parameters()}


def gathered(value: Any) -> list[Any]:
    """What every rank has there."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
    return [name for name, value in expected.items() if not same(found[name], value)]


def is_settings(name: str) -> bool:
    return name.startswith("group ")


def on_any_rank(names: list[str]) -> list[str]:
    """What a rank has for itself, as its copy of the weights, may be wrong there alone."""
    return sorted(set().union(*gathered(names)))


def same(one: Any, other: Any) -> bool:
    return bool(one.equal(other) if isinstance(other, torch.Tensor) else one == other)


def masters_are_weights(states: dict[str, Any]) -> bool:
    weights = {name.removesuffix(".weight"): value for name, value in states.items() if name.endswith(".weight")}
    return all(states[f"{name}.fp32"].equal(weight.float()) for name, weight in weights.items())


def begin(rank: int, args: argparse.Namespace) -> dict[str, Any]:
    run = engine(args.folder.name, args.ranks, universal=False, seed=0)
    train(run, rank, args.ranks, first=0)
    for group in groups_of(run):
        group["lr"] /= 2  # as a scheduler would: it is not what the next run is started with
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    run.save_checkpoint(str(args.folder), tag=TAG, client_state={**info, "iteration": STEPS})
    truth: dict[str, Any] = {"saved": snapshot(run), "losses": train(run, rank, args.ranks, first=STEPS)}
    truth["end"] = snapshot(run)
    if rank == 0:
        torch.save(truth, args.folder / "truth.pt")
    return {"optimizer": type(run.optimizer).__name__}


def resume(rank: int, args: argparse.Namespace) -> dict[str, Any]:
    truth = torch.load(args.folder / "truth.pt", weights_only=False)
    run = engine(args.folder.name, args.ranks, universal=args.tag != TAG, seed=1)
    client_state = load(run, args.folder, args.tag)
    if rank == args.spoil:
        next(run.module.parameters()).data.view(-1)[0] += 1
    states = snapshot(run)
    different = on_any_rank(differences(states, truth["saved"]))
    if different and all(is_settings(name) for name in different):  # see what else is wrong
        for number, group in enumerate(groups_of(run)):
            group.update(truth["saved"][f"group {number}"])
    found = {"different": different, "masters are weights": masters_are_weights(states), "steps": states["steps"]}
    try:
        losses = train(run, rank, args.ranks, first=STEPS)
    except Exception as error:
        return {**found, "error": last_words(error)}
    if args.save:
        run.save_checkpoint(str(args.folder / args.save), tag=TAG, client_state=client_state)
    end = on_any_rank(differences(snapshot(run), truth["end"]))
    return {**found, "losses": losses, "expected": truth["losses"], "different_end": end}


def load(run: Any, folder: Path, tag: str) -> Any:
    """Load a checkpoint; what of it is the client's.

    Up to 0.14.0 a universal one is loaded only with an object for model parallelism.
    """
    needed = tag != TAG and numbers(deepspeed.__version__) <= (0, 14, 0)
    if needed:
        run.optimizer.mpu = OneTensorParallelRank
    _, client_state = run.load_checkpoint(str(folder), tag=tag)
    if needed:
        run.optimizer.mpu = None
    return client_state


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("+")[0].split("."))


def last_words(error: Exception) -> str:
    traceback.print_exc()
    return f"{type(error).__name__}: {error}"


def work_and_tell(rank: int, args: argparse.Namespace) -> None:
    """What came of it, in a file of the rank: what it found, or its last words."""
    try:
        told = args.do(rank, args)
    except Exception as error:
        told = {"error": last_words(error)}
    Path(args.told, str(rank)).write_text(json.dumps(told))
    if "error" in told:
        raise SystemExit(1)


def on_ranks(args: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 has found; where ranks have died, what the first of those says."""
    context = multiprocessing.get_context("fork")
    port = zero_training.free_port()
    ranks = [context.Process(target=zero_training.rank_main, args=(rank, port, args)) for rank in range(args.ranks)]
    for process in ranks:
        process.start()
    died = float("inf")
    while any(process.is_alive() for process in ranks):
        time.sleep(0.02)
        if any(process.exitcode for process in ranks):
            died = min(died, time.monotonic())
        if time.monotonic() > died + PATIENCE:
            for process in ranks:
                process.kill()
    found = [json.loads(path.read_text()) for path in sorted(Path(args.told).iterdir())]
    errors = [one for one in found if "error" in one]
    if not errors and any(process.exitcode for process in ranks):
        errors = [{"error": f"exit statuses {[process.exitcode for process in ranks]}"}]
    # A rank that has lost another one says so; the cause is what is said of anything else.
    causes = [one for one in errors if "gloo/transport" not in one["error"]]
    return dict([*causes, *errors, *found][0])


def reduce_as_on_a_gpu() -> None:
    """Let the engine reduce 16-bit gradients itself, as it does without ZeRO and for BF16_Optimizer.

    Up to 0.16 it reduces those of types that the accelerator lists, where a CPU does not list fp16. Up to 0.12 it looks
    for `torch.cpu.HalfTensor`, which torch calls `torch.HalfTensor`.
    """
    get_accelerator().supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
    if numbers(deepspeed.__version__) < (0, 13):
        deepspeed.runtime.engine.split_half_float_double_sparse = by_type


def by_type(gradients: list[torch.Tensor]) -> list[tuple[str, list[torch.Tensor]]]:
    kinds = sorted({gradient.type() for gradient in gradients})
    return [(kind, [gradient for gradient in gradients if gradient.type() == kind]) for kind in kinds]


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    training, resuming = commands.add_parser("train"), commands.add_parser("resume")
    training.set_defaults(do=begin)
    training.add_argument("folder", type=Path)
    resuming.set_defaults(do=resume, folder=Path())
    resuming.add_argument("--tag", default=TAG)
    resuming.add_argument("--spoil", type=int, metavar="RANK")
    resuming.add_argument("--save", metavar="NAME")
    for command in (training, resuming):
        command.set_defaults(work=work_and_tell)
        command.add_argument("cases", nargs="+")
        command.add_argument("--ranks", type=int, required=True)
        command.add_argument("--node", type=int)
    args = parser.parse_args()
    zero_training.prepare()
    reduce_as_on_a_gpu()
    found = {}
    for case in args.cases:
        with tempfile.TemporaryDirectory() as told:
            one = copy.copy(args)
            one.folder, one.told = args.folder / case, told
            found[case] = on_ranks(one)
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
