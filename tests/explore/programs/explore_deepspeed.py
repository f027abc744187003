"""Train and save one configuration of the explorer with the real DeepSpeed on CPU ranks, or load and judge it.

    explore_deepspeed.py train CASE.json FOLDER     writes two saves, FOLDER/first and FOLDER/last, and FOLDER/truth.pt
    explore_deepspeed.py convert FOLDER OUTPUT      runs DeepSpeed's converter
    explore_deepspeed.py load CASE.json FOLDER      prints the result of the load as JSON

The truth is the content of the optimizer's memory. This program reads it without any accessor of DeepSpeed or ours.
"""

import copy
import functools
import gc
import io
import itertools
import json
import math
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.utils import groups as expert_groups

import explored
from explore_deepspeed_model import SLICED, Model, expert_ranks, loss, optimizer, patterns, pipeline
from explored import FIRST, LAST, Options, Part, SaveFailed, State, alike, is_nothing
from trainers import deepspeed_training as dt
from trainers import ranks
from trainers.experts_training import numbered
from trainers.optimizers import MOMENTUM

SAMPLES = 60  # per step; divisible by 1 to 5 ranks
MORE = 2  # the number of steps after the load
OF_LAYOUT = ("params", "name")  # keys of a param group; an expert group's name depends on the ranks
NUMBERS = {"steps": "step", "products": "mu_product"}  # states of each parameter; NAdam has `mu_product`
COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def engine(options: Options, on: Options, seed: int, *, universal: bool = False) -> Any:
    """Create an engine on the given ranks and nodes."""
    ranks = on["ranks"]
    gc.freeze()
    torch._dynamo.config.disable = True
    torch.manual_seed(seed)
    model = pipeline(options) if options["pipeline"] else Model(options, ranks)
    data_parallel = ranks // max(1, options["pipeline"]) // options["tp"]
    zero = {"stage": options["stage"], "reduce_bucket_size": options["bucket"]}
    flags = ("round_robin_gradients", "overlap_comm", "parameter_alignment")
    zero |= {name: True for name in flags if options[name]}
    zero |= {"contiguous_gradients": options["contiguous_gradients"]}
    if options["stage"] == 3:
        zero["stage3_param_persistence_threshold"] = options["persistent"]
        zero |= {"sub_group_size": options["sub_group_size"]} if options["sub_group_size"] else {}
        zero |= {"zero_hpz_partition_size": ranks // on["nodes"]} if options["hpz"] else {}
        zero |= {"save_muon_momentum_buffer_in_memory": True} if options["momentum_in_memory"] else {}
    if options["offload"]:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // data_parallel // options["accumulation"],
        "gradient_accumulation_steps": options["accumulation"],
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0 if options["clipping"] else 0.0,
        "zero_optimization": zero,
        "checkpoint": {
            "load_universal": universal,
            **({"writer": options["writer"]} if options["writer"] else {}),
        },
    }
    if options["dtype"] == "bf16":
        config["bf16"] = {"enabled": True}
    if options["dtype"] == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 24 if options["overflow"] else 4, "hysteresis": 1}
    if options["fp32_gradients"]:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if options["warm_up"]:
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    mpu = groups_of_sequences() if options["sequences"] and ranks % 2 == 0 else None
    if options["tp"] > 1:
        model.cut(mpu := groups_of_slices(options["tp"]))
    return deepspeed.initialize(model=model, config=config, mpu=mpu, **optimizer(model, options, config))[0]


@functools.cache
def groups_of_sequences() -> Any:
    """Make pairs of ranks share sequences, as in DeepSpeed's ALST. DeepSpeed before 0.17 does not support this."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(2)
    return parallel_state_sp


@functools.cache
def groups_of_slices(size: int) -> Any:
    """Create the groups of tensor-parallel ranks as Megatron-DeepSpeed does."""
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=size, num_dp=dist.get_world_size() // size)
    return PipelineParallelGrid(topology=topology)


def train(run: Any, options: Options, first: int, steps: int) -> list[float]:
    """Train, and return the mean loss of each step."""
    if options["pipeline"]:
        return train_pipeline(run, options, first, steps)
    rank, ranks, count = dist.get_rank(), dist.get_world_size(), options["accumulation"]
    if options["tp"] > 1:
        rank, ranks = run.mpu.get_data_parallel_rank(), run.mpu.get_data_parallel_world_size()
    dtype, losses = next(run.module.parameters()).dtype, []
    for step in range(first, first + steps):
        total = torch.zeros(())
        for part in samples(step, dtype).chunk(ranks)[rank].chunk(count):
            of_part = loss(run(part))
            run.backward(of_part)
            with torch.no_grad():
                run.step()
            total += of_part.detach() / count
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def train_pipeline(run: Any, options: Options, first: int, steps: int) -> list[float]:
    rank, ranks = run.grid.get_data_parallel_rank(), run.grid.get_data_parallel_world_size()
    dtype, losses = next(run.module.parameters()).dtype, []
    for step in range(first, first + steps):
        own = samples(step, dtype).chunk(ranks)[rank].chunk(options["accumulation"])
        losses.append(float(run.train_batch(iter([(part, part) for part in own]))))
    return losses


def samples(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SAMPLES, Model.HIDDEN, generator=torch.Generator().manual_seed(step)).to(dtype)


def parts(run: Any) -> Iterator[Part]:
    return (placed(run, part) for part in parts_of_slices(run))


def parts_of_slices(run: Any) -> Iterator[Part]:
    """Yield the parts of weights, main parameters and optimizer states. A tensor that is not sharded is one part."""
    names = names_of(run)
    for parameter, name in names.items():
        if hasattr(parameter, "ds_tensor"):
            yield from _shard(f"{name}.weight", parameter, parameter.ds_tensor.flatten(), 0)
        if parameter.numel() or not hasattr(parameter, "ds_tensor"):  # stage 3 also keeps persistent ones in full
            yield Part(f"{name}.weight", parameter.data.view(-1), 0, parameter.numel())
    for name, buffer in run.module.named_buffers():
        yield Part(f"buffer {name}", buffer.view(-1), 0, buffer.numel())
    inner = inner_optimizer(run)
    for number, (main, parameters, begin) in enumerate(groups(run, inner)):
        starts = addresses(run, number, parameters)
        own = {"fp32": main.detach(), **inner.state.get(main, {})}
        for key, value in own.items():
            if isinstance(value, torch.Tensor) and key == MOMENTUM and is_of_matrices(run, number):
                matrices = run.optimizer.params_in_partition[number]
                yield from _cut(key, value.view(-1), matrices, 0, names)
            elif isinstance(value, torch.Tensor) and value.shape == main.shape:
                yield from _cut(key, value.view(-1), parameters, begin, names, starts)


def placed(run: Any, part: Part) -> Part:
    """Return the part with its position in the full parameter instead of the slice."""
    name = part.name.rpartition(".")[0]
    size = run.mpu.get_slice_parallel_world_size() if isinstance(run.mpu, PipelineParallelGrid) else 1
    if size == 1 or name not in SLICED:
        return part
    axis, shape = SLICED[name]
    every = torch.arange(math.prod(shape)).view(shape)
    own = every.chunk(size, axis)[run.mpu.get_slice_parallel_rank()].flatten()
    return part._replace(where=own[part.where : part.where + part.local.numel()], numel=every.numel())


def names_of(run: Any) -> dict[Any, str]:
    """Return the parameters' names. The name of an expert contains its global number."""
    ranks = dist.get_world_size()
    name = f"ep_size_{expert_ranks(ranks)}"
    local = [module.num_local_experts for module in run.module.modules() if isinstance(module, MoE)]
    first = local[0] * expert_groups._get_expert_parallel_rank(name) if local else 0
    return {parameter: numbered(name, first) for name, parameter in run.module.named_parameters()}


def is_of_matrices(run: Any, group: int) -> bool:
    """Return whether the group has Muon's momentum at stage 1 or 2.

    That momentum covers the full matrix even if the partition contains only a part of the matrix.
    """
    return run.zero_optimization_stage() in (1, 2) and bool(inner_optimizer(run).param_groups[group].get("use_muon"))


def addresses(run: Any, group: int, parameters: list[Any]) -> list[int]:
    """Return the offset of each parameter in the group's flat buffer, or an empty list without a buffer."""
    flats = getattr(run.optimizer, "bit16_groups_flat", None)
    if not flats or hasattr(run.optimizer, "fp32_groups_flat_partition"):
        return []
    first = flats[group].data_ptr()
    return [(parameter.data_ptr() - first) // parameter.element_size() for parameter in parameters]


def _cut(
    key: str, flat: torch.Tensor, parameters: list[Any], begin: int, names: dict[Any, str], starts: Sequence[int] = ()
) -> Iterator[Part]:
    """Yield the part of each parameter in a flat tensor. Without `starts` they are contiguous from element 0."""
    at = 0
    for number, parameter in enumerate(parameters):
        at = starts[number] if starts else at
        name = f"{names[parameter]}.{key}"
        if hasattr(parameter, "ds_tensor"):
            yield from _shard(name, parameter, flat, at)
            at += parameter.partition_numel()
        else:
            low, high = max(at, begin), min(at + parameter.numel(), begin + flat.numel())
            if low < high:
                yield Part(name, flat[low - begin : high - begin], low - at, parameter.numel())
            at += parameter.numel()


def _shard(name: str, parameter: Any, flat: torch.Tensor, at: int) -> Iterator[Part]:
    """Yield this rank's shard at stage 3. All ranks have equal shares of a parameter; padding fills the last share."""
    each = parameter.partition_numel()
    begin = dist.get_rank(parameter.ds_process_group) * each
    if (count := min(each, parameter.ds_numel - begin)) > 0:
        yield Part(name, flat[at : at + count], begin, parameter.ds_numel)


def inner_optimizer(run: Any) -> Any:
    return getattr(run.optimizer, "optimizer", run.optimizer)


def groups(run: Any, inner: Any) -> Iterator[tuple[torch.Tensor, list[Any], int]]:
    """Yield each main parameter of the inner optimizer, the parameters that it represents, and its offset in them.

    A main parameter is a flat tensor of this rank's share (stages 1 to 3), a flat tensor of all parameters
    (FP16_Optimizer), or a single parameter.
    """
    outer = run.optimizer
    if hasattr(outer, "fp32_partitioned_groups_flat"):  # stage 3, which has sub-groups
        for flat, parameters in zip(outer.fp32_partitioned_groups_flat, outer.fp16_groups, strict=True):
            yield flat, list(parameters), 0
    elif hasattr(outer, "single_partition_of_fp32_groups"):  # stage 1 and 2
        flats = zip(outer.single_partition_of_fp32_groups, outer.round_robin_bit16_groups, strict=True)
        for number, (flat, parameters) in enumerate(flats):
            yield flat, list(parameters), dist.get_rank(outer.real_dp_process_group[number]) * flat.numel()
    elif hasattr(outer, "fp32_groups_flat_partition"):  # BF16_Optimizer
        flats = zip(outer.fp32_groups_flat_partition, outer.bf16_groups, strict=True)
        for number, (flat, parameters) in enumerate(flats):
            yield flat, list(parameters), dist.get_rank(outer.real_dp_process_group[number]) * flat.numel()
    elif hasattr(outer, "fp32_groups_flat"):  # FP16_Optimizer
        for flat, parameters in zip(outer.fp32_groups_flat, outer.fp16_groups, strict=True):
            yield flat, list(parameters), 0
    elif hasattr(outer, "fp32_groups"):
        for mains, parameters in zip(outer.fp32_groups, outer.fp16_groups, strict=True):
            for main, parameter in zip(mains, parameters, strict=True):
                yield main, [parameter], 0
    else:
        for parameter in itertools.chain(*(group["params"] for group in inner.param_groups)):
            yield parameter, [parameter], 0


def live(run: Any) -> State:
    """Return everything that the next steps depend on: full tensors and other values.

    The result is the same on each rank if the state is correct.

    Elements that no rank has are NaN.
    """
    of_ranks = explored.of_ranks(in_fp32(part) for part in parts(run))
    found = explored.whole(of_ranks)
    for name in unlike(of_ranks):
        del found[name]
        found |= {f"{name} on rank {rank}": own[name] for rank, own in enumerate(map(wholes, of_ranks)) if name in own}
    inner = inner_optimizer(run)
    own: State = {}
    for number, group in enumerate(inner.param_groups):
        values = {key: copy.deepcopy(value) for key, value in group.items() if key not in OF_LAYOUT}
        own |= {f"{name}.{key}": value for name in group_names(run, number) for key, value in values.items()}
    for of_rank in [*explored.gathered(own), own] if hasattr(run, "grid") else [own]:  # each stage has its own groups
        found |= of_rank
    for key, state in NUMBERS.items():
        found[key] = sorted({one for of_rank in explored.gathered(_of_states(run, inner, state)) for one in of_rank})
    found |= {f"counter {name}": getattr(run, name) for name in COUNTERS}
    for what, of in SETTINGS.items():
        found |= {f"{what}.{name}": value for name, value in of(run).items()}
    return found


def group_names(run: Any, number: int) -> list[str]:
    """Return the names of a param group. In a pipeline, return one name per parameter: stages have different groups."""
    if not hasattr(run, "grid"):
        return [f"group {number}"]
    inner = inner_optimizer(run)
    mains, names = {id(main) for main in inner.param_groups[number]["params"]}, names_of(run)
    held = [parameters for main, parameters, _ in groups(run, inner) if id(main) in mains]
    return [f"group of {names[parameter]}" for parameter in itertools.chain(*held)]


def wholes(mine: list[Part]) -> State:
    """Return the momenta of full matrices among a rank's parts."""
    return {name: own for name, own, _, numel in mine if name.endswith(MOMENTUM) and own.numel() == numel}


def unlike(of_ranks: list[list[Part]]) -> set[str]:
    """Return the momenta that differ between ranks. Some releases of Muon have this where two ranks share a matrix."""
    first: State = {}
    for own in map(wholes, of_ranks):
        first = own | first
    return {name for own in map(wholes, of_ranks) for name, momentum in own.items() if not alike(momentum, first[name])}


def in_fp32(part: Part) -> Part:
    """Convert Muon's momentum to FP32. A load leaves it in FP32, and the next step restores its own type."""
    return part._replace(local=part.local.float()) if part.name.endswith(MOMENTUM) else part


def _of_states(run: Any, inner: Any, name: str) -> set[float]:
    """Return the values of a state that is one number per parameter."""
    every = [inner.state.get(main, {}).get(name) for main, *_ in groups(run, inner)]
    return {float(number) for number in every if number is not None}


def _scaler(run: Any) -> Any:
    return dt.scaler_of(run.optimizer) if hasattr(run.optimizer, "overflow") else None


# The numeric attributes of the loss scaler and of the learning-rate scheduler.
OF_SCALER = re.compile(r"cur_|last_overflow|(loss_)?scale$")
SETTINGS: dict[str, Callable[[Any], State]] = {
    "scaler": lambda run: _numbers(_scaler(run), OF_SCALER),
    "scheduler": lambda run: _numbers(run.lr_scheduler, re.compile("")),
}


def _numbers(one: Any, names: re.Pattern[str]) -> State:
    values = vars(one).items() if one else ()
    return {name: value for name, value in values if isinstance(value, (bool, int, float)) and names.match(name)}


def put(run: Any, options: Options, state: State) -> None:
    """Set a run's memory to a state. The run then continues as it must continue after a correct load."""
    if any(kind_of(name) == "state" for name in state):
        train(run, options, 90, 2)  # a fresh optimizer has no states yet
    explored.put(parts(run), state)
    inner = inner_optimizer(run)
    for own, (key, name) in itertools.product(inner.state.values(), NUMBERS.items()):
        if name in own:
            (number,) = state[key]
            own[name] = torch.full_like(own[name], number) if isinstance(own[name], torch.Tensor) else int(number)
    for parameter in run.module.parameters():
        if getattr(parameter, "ds_secondary_tensor", None) is not None:
            parameter.ds_secondary_tensor = None  # the node's copy
    for number, group in enumerate(inner.param_groups):
        name = group_names(run, number)[0]
        group.update({key: state[f"{name}.{key}"] for key in group if key not in OF_LAYOUT})
    for name in COUNTERS:
        setattr(run, name, state[f"counter {name}"])
    for what, one in (("scaler", _scaler(run)), ("scheduler", run.lr_scheduler)):
        for name in SETTINGS[what](run):
            setattr(one, name, state[f"{what}.{name}"])


# The arguments of a load, and the kinds that it must restore. All other kinds must stay unchanged.
WEIGHTS = ("weight", "buffer")
PROMISES: dict[str, tuple[dict[str, bool], tuple[str, ...]]] = {
    "everything": ({}, ("",)),
    "module only": ({"load_module_only": True}, WEIGHTS),
    "without optimizer states": ({"load_optimizer_states": False}, (*WEIGHTS, "counter", "scheduler")),
    "without scheduler": (
        {"load_lr_scheduler_states": False},
        (*WEIGHTS, "fp32", "state", "group", *NUMBERS, "counter", "scaler"),
    ),
}


def kind_of(name: str) -> str:
    """Return the kind of an entry: weight, buffer, fp32 (a main parameter), state, group, steps, counter, scaler, …"""
    first = name.split(" ")[0].split(".")[0] if name.startswith(("buffer ", "group ", "counter ")) else ""
    if first or name in NUMBERS or name.startswith(("scaler.", "scheduler.")):
        return first or name.split(".")[0]
    last = name.rpartition(".")[2]
    return last if last in ("weight", "fp32") else "state"


def begin(rank: int, case: Options, folder: Path) -> Options:
    options = case["run"]
    run = engine(options, case, seed=0)
    train(run, options, 0, options["steps"])
    for group in inner_optimizer(run).param_groups:
        if not options["warm_up"]:
            group["lr"] /= 2  # as a user's scheduler does; the next run starts with another rate
    truth: State = {}
    at = options["steps"]
    for tag, more in ((FIRST, 1), (LAST, MORE)):
        if tag == LAST and case["killed"]:
            truth[tag] = {"saved": live(run), "at": at}
            keep(rank, folder, truth)
        info: Options = {"iteration": at}
        if not options["experts"]:  # some releases reserve this key for runs with experts
            of_slices = patterns(options) if options["tp"] > 1 else {}
            info["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.2, **of_slices}
        killed = case["killed"] if tag == LAST else 0
        save = ending(rank, killed, case["ranks"]) if killed else explored.saver(case, tag, rank)
        try:
            with mock.patch("torch.save", save):
                run.save_checkpoint(str(folder), tag=tag, client_state=info)
        except Exception as error:
            raise SaveFailed(f"{type(error).__name__}: {error}") from error
        truth[tag] = {"saved": live(run), "at": at}
        if options["ends_at_save"] and tag == (LAST if case["two_saves"] else FIRST):
            run.destroy()
            break
        truth[tag]["losses"] = train(run, options, at, more)
        truth[tag]["end"] = live(run)
        at += more
        if not case["two_saves"]:
            break
    keep(rank, folder, truth)
    return {"optimizer": type(run.optimizer).__name__}


def keep(rank: int, folder: Path, truth: State) -> None:
    if rank == 0:
        torch.save(truth, folder / "truth.pt")
    dist.barrier()


def ending(rank: int, killed: int, ranks: int) -> Callable[..., None]:
    """Return a `torch.save` that, on one rank, writes half of a file and then kills its process as the kernel does."""
    save, left = torch.save, iter(range((killed - 1) // ranks, -1, -1))

    def save_or_end(obj: Any, f: Any, *args: Any, **keywords: Any) -> None:
        if rank != (killed - 1) % ranks or next(left, -1) != 0:
            save(obj, f, *args, **keywords)
            return
        save(obj, whole := io.BytesIO(), *args, **keywords)
        half = whole.getvalue()[: whole.tell() // 2]
        if hasattr(f, "write"):
            f.write(half)
            f.flush()
        else:
            Path(f).write_bytes(half)
        os.kill(os.getpid(), signal.SIGKILL)

    return save_or_end


def load(rank: int, case: Options, folder: Path) -> Options:
    """Load, and return the differences from the truth on any rank and in the losses of the next steps."""
    wanted = case["load"]
    options = {**case["run"], "groups": case["run"]["groups"] + wanted["more_groups"]}
    options["pipeline"] = wanted["stages"] or options["pipeline"]
    options["tp"] = wanted["tp"] or options["tp"]
    universal = "universal" in wanted["kind"]
    run = engine(options, wanted, seed=1, universal=universal)
    if wanted["trained"]:  # the run has trained before, as in a trainer that rolls back
        train(run, options, 50, 1)
    asked, restored = PROMISES[wanted["restore"]]
    name = f"{wanted['tag']}_universal" if universal else wanted["tag"]
    if wanted["latest"]:
        name = (folder / ("latest_universal" if universal else "latest")).read_text()
    for number in range(wanted["times"]):
        if number:  # a rollback
            train(run, options, 60, 1)
        before = live(run)
        with explored.proof() as proof:
            path, _ = run.load_checkpoint(str(folder), tag=None if wanted["latest"] else name, **asked)
        if path is None:
            raise FileNotFoundError("load_checkpoint returns no path")
    if wanted.get("spoil"):  # for tests: change the loaded state, or make a rank hang
        explored.spoil(parts(run), wanted["spoil"])
    truths = torch.load(folder / "truth.pt", weights_only=False)
    # If a save killed a rank, the tracker names the previous save or this save. Otherwise it names the last save.
    truth = truths[name.removesuffix("_universal") if case["killed"] else wanted["tag"]]
    found = live(run)
    different = explored.on_any_rank(differences(found, truth["saved"], before, restored))
    if wanted["repaired"]:
        train(run, options, 70, 1)
        return {"different": explored.unrepaired(different, found, truths, case), "proof": proof}
    if different or restored[0] or "losses" not in truth:
        train(run, options, 70, 1)  # an error here is an error for the user
        return {"different": different, "proof": proof}
    losses, end = truth["losses"], truth["end"]
    names = ("pipeline", "tp")
    other_layout = wanted["ranks"] != case["ranks"] or any(options[name] != case["run"][name] for name in names)
    if other_layout or wanted["old"]:  # another layout changes the order of sums; the fixes also change steps
        reference = engine(options, wanted, seed=2)
        put(reference, options, truth["saved"])
        losses, end = train(reference, options, truth["at"], len(losses)), live(reference)
    differ = ["next loss"] * (train(run, options, truth["at"], len(losses)) != losses)
    later = explored.on_any_rank(explored.different(live(run), end))
    return {"different": differ + [f"later {name}" for name in later], "proof": proof}


def differences(found: State, saved: State, before: State, restored: tuple[str, ...]) -> list[str]:
    """Return the restored entries that differ from the save and the other entries that differ from before the load."""
    different = []
    for key in sorted({*saved, *found}):
        if not restored[0] or kind_of(key).startswith(restored):
            good = alike(found.get(key), saved.get(key))
        elif kind_of(key) == "fp32":  # main parameters may match the new weights or the checkpoint
            good = alike(found.get(key), saved.get(key)) or is_weight(found, key)
        else:
            good = alike(found.get(key), before.get(key)) or is_nothing(found.get(key), before.get(key))
        different += [] if good else [key]
    return different


def is_weight(found: State, key: str) -> bool:
    weight = found.get(f"{key.removesuffix('.fp32')}.weight")
    return weight is not None and alike(found[key], weight.float())


def convert(checkpoint: Path, output: Path) -> Options:
    """Call DeepSpeed's converter in a separate process. With the fixes, it hands over to ours."""
    try:
        ranks.results(functools.partial(dt.convert_by_upstream, handed_over=True), 1, checkpoint, output)
    except ranks.RankError as error:
        return {"error": str(error)}
    return {}


def join(nodes: int, rank: int, count: int, port: int) -> None:
    node = count // nodes
    os.environ["CROSS_RANK"], os.environ["CROSS_SIZE"] = str(rank // node), str(nodes)  # writers read these
    dt.join(rank, count, node, port)


def main() -> None:
    args = explored.arguments("train", "convert", "load").parse_args()
    if args.command == "convert":
        print("\n" + json.dumps(convert(args.case, args.folder)))
        return
    case = json.loads(args.case.read_text())
    on = case if args.command == "train" else case["load"]
    do = {"train": begin, "load": load}[args.command]
    dt.prepare()
    dt.reduce_as_on_a_gpu()
    chosen = explored.ranks_of(args, on["ranks"], killed=args.command == "train" and case["killed"] > 0)
    found = explored.on_ranks(lambda rank: do(rank, case, args.folder), chosen, functools.partial(join, on["nodes"]))
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
