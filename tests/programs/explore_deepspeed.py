"""Train one configuration of the explorer with the real DeepSpeed on CPU ranks and save it, or load that and judge.

    explore_deepspeed.py train CASE.json FOLDER     FOLDER/first, FOLDER/last: two saves; FOLDER/truth.pt
    explore_deepspeed.py convert FOLDER OUTPUT      by DeepSpeed's converter
    explore_deepspeed.py load CASE.json FOLDER      prints what came of the load, as JSON

The truth is what is in the optimizer's memory, read here: no accessor of DeepSpeed's or of ours takes part.
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
from ckpt_patches.demo import deepspeed_training as dt
from ckpt_patches.demo import ranks
from ckpt_patches.demo.experts_training import numbered
from ckpt_patches.demo.optimizers import MOMENTUM
from explore_deepspeed_model import SLICED, Model, expert_ranks, loss, optimizer, patterns, pipeline
from explored import FIRST, LAST, Options, Part, SaveFailed, State, alike, is_nothing

SAMPLES = 60  # of a step: for 1 to 5 ranks
MORE = 2  # steps that are taken after the load
OF_LAYOUT = ("params", "name")  # of a param group: one of experts is named after the ranks that share them
NUMBERS = {"steps": "step", "products": "mu_product"}  # states of each parameter: the latter is NAdam's
COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def engine(options: Options, on: Options, seed: int, *, universal: bool = False) -> Any:
    """A run on so many ranks and nodes."""
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
    """Two ranks each have parts of the same sequences, as in DeepSpeed's ALST; not in its releases before 0.17."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(2)
    return parallel_state_sp


@functools.cache
def groups_of_slices(size: int) -> Any:
    """Of tensor-parallel ranks, as Megatron-DeepSpeed has them."""
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=size, num_dp=dist.get_world_size() // size)
    return PipelineParallelGrid(topology=topology)


def train(run: Any, options: Options, first: int, steps: int) -> list[float]:
    """The mean loss of each step."""
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
    """Of weights, main parameters and states of the optimizer; a whole one of what each rank has for itself."""
    names = names_of(run)
    for parameter, name in names.items():
        if hasattr(parameter, "ds_tensor"):
            yield from _shard(f"{name}.weight", parameter, parameter.ds_tensor.flatten(), 0)
        if parameter.numel() or not hasattr(parameter, "ds_tensor"):  # a persistent one of stage 3 is there as well
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
    """A part of a slice, by where it is in the whole parameter."""
    name = part.name.rpartition(".")[0]
    size = run.mpu.get_slice_parallel_world_size() if isinstance(run.mpu, PipelineParallelGrid) else 1
    if size == 1 or name not in SLICED:
        return part
    axis, shape = SLICED[name]
    every = torch.arange(math.prod(shape)).view(shape)
    own = every.chunk(size, axis)[run.mpu.get_slice_parallel_rank()].flatten()
    return part._replace(where=own[part.where : part.where + part.local.numel()], numel=every.numel())


def names_of(run: Any) -> dict[Any, str]:
    """The parameters' names, in which an expert has its number among all."""
    ranks = dist.get_world_size()
    name = f"ep_size_{expert_ranks(ranks)}"
    local = [module.num_local_experts for module in run.module.modules() if isinstance(module, MoE)]
    first = local[0] * expert_groups._get_expert_parallel_rank(name) if local else 0
    return {parameter: numbered(name, first) for name, parameter in run.module.named_parameters()}


def is_of_matrices(run: Any, group: int) -> bool:
    """Muon's momentum at stage 1 and 2 is of all of each matrix of which a part is in the partition."""
    return run.zero_optimization_stage() in (1, 2) and bool(inner_optimizer(run).param_groups[group].get("use_muon"))


def addresses(run: Any, group: int, parameters: list[Any]) -> list[int]:
    """The element of the group's flat buffer at which each parameter starts, by its address; empty if it has none."""
    flats = getattr(run.optimizer, "bit16_groups_flat", None)
    if not flats or hasattr(run.optimizer, "fp32_groups_flat_partition"):
        return []
    first = flats[group].data_ptr()
    return [(parameter.data_ptr() - first) // parameter.element_size() for parameter in parameters]


def _cut(
    key: str, flat: torch.Tensor, parameters: list[Any], begin: int, names: dict[Any, str], starts: Sequence[int] = ()
) -> Iterator[Part]:
    """What a flat tensor has of each parameter. Without `starts` the parameters follow each other from element 0."""
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
    """At stage 3 each rank has an equal share of each parameter, the last one with padding."""
    each = parameter.partition_numel()
    begin = dist.get_rank(parameter.ds_process_group) * each
    if (count := min(each, parameter.ds_numel - begin)) > 0:
        yield Part(name, flat[at : at + count], begin, parameter.ds_numel)


def inner_optimizer(run: Any) -> Any:
    return getattr(run.optimizer, "optimizer", run.optimizer)


def groups(run: Any, inner: Any) -> Iterator[tuple[torch.Tensor, list[Any], int]]:
    """What the inner optimizer steps: a main parameter, the parameters that it stands for, and where in them it begins.

    A flat one of this rank's share (stages 1 to 3), a flat one of all (FP16_Optimizer), or each by itself.
    """
    outer = run.optimizer
    if hasattr(outer, "fp32_partitioned_groups_flat"):  # stage 3; of sub-groups
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
    """All that the next steps depend on: tensors whole, and what is not a tensor; the same on each rank if all is well.

    What no rank has of a tensor is NaN.
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
    for of_rank in [*explored.gathered(own), own] if hasattr(run, "grid") else [own]:  # each stage has its own
        found |= of_rank
    for key, state in NUMBERS.items():
        found[key] = sorted({one for of_rank in explored.gathered(_of_states(run, inner, state)) for one in of_rank})
    found |= {f"counter {name}": getattr(run, name) for name in COUNTERS}
    for what, of in SETTINGS.items():
        found |= {f"{what}.{name}": value for name, value in of(run).items()}
    return found


def group_names(run: Any, number: int) -> list[str]:
    """Of a param group; in a pipeline, where other stages have others, one of each of its parameters."""
    if not hasattr(run, "grid"):
        return [f"group {number}"]
    inner = inner_optimizer(run)
    mains, names = {id(main) for main in inner.param_groups[number]["params"]}, names_of(run)
    held = [parameters for main, parameters, _ in groups(run, inner) if id(main) in mains]
    return [f"group of {names[parameter]}" for parameter in itertools.chain(*held)]


def wholes(mine: list[Part]) -> State:
    """Of a rank's parts the momenta of whole matrices."""
    return {name: own for name, own, _, numel in mine if name.endswith(MOMENTUM) and own.numel() == numel}


def unlike(of_ranks: list[list[Part]]) -> set[str]:
    """The momenta that are not the same on all ranks: some releases' Muon has others where a matrix lies on two."""
    first: State = {}
    for own in map(wholes, of_ranks):
        first = own | first
    return {name for own in map(wholes, of_ranks) for name, momentum in own.items() if not alike(momentum, first[name])}


def in_fp32(part: Part) -> Part:
    """Of Muon's momentum: a load leaves it in that type, and the next step puts it back into its own."""
    return part._replace(local=part.local.float()) if part.name.endswith(MOMENTUM) else part


def _of_states(run: Any, inner: Any, name: str) -> set[float]:
    """Of a state that is a number for each parameter, its values."""
    every = [inner.state.get(main, {}).get(name) for main, *_ in groups(run, inner)]
    return {float(number) for number in every if number is not None}


def _scaler(run: Any) -> Any:
    return dt.scaler_of(run.optimizer) if hasattr(run.optimizer, "overflow") else None


# Of what counts for the loss scale, and of a learning-rate scheduler, the attributes that are numbers.
OF_SCALER = re.compile(r"cur_|last_overflow|(loss_)?scale$")
SETTINGS: dict[str, Callable[[Any], State]] = {
    "scaler": lambda run: _numbers(_scaler(run), OF_SCALER),
    "scheduler": lambda run: _numbers(run.lr_scheduler, re.compile("")),
}


def _numbers(one: Any, names: re.Pattern[str]) -> State:
    values = vars(one).items() if one else ()
    return {name: value for name, value in values if isinstance(value, (bool, int, float)) and names.match(name)}


def put(run: Any, options: Options, state: State) -> None:
    """Set a run's memory to a state, as if it had been loaded: what goes on from there is what a load is to come to."""
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


# What a load is asked to restore; all else stays as the run had it.
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
    """Of what is in a state: a weight, a buffer, fp32 (a main parameter), state, group, steps, counter, scaler, …"""
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
            group["lr"] /= 2  # as a scheduler of the user's would: it is not what the next run is started with
    truth: State = {}
    at = options["steps"]
    for tag, more in ((FIRST, 1), (LAST, MORE)):
        if tag == LAST and case["killed"]:
            truth[tag] = {"saved": live(run), "at": at}
            keep(rank, folder, truth)
        info: Options = {"iteration": at}
        if not options["experts"]:  # with them it is a key that some releases reserve
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
    """A `torch.save` that writes half of a file, and ends its process as the kernel would; on one rank."""
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
    """What differs from the truth after a load on any rank, and in the losses of the next steps."""
    wanted = case["load"]
    options = {**case["run"], "groups": case["run"]["groups"] + wanted["more_groups"]}
    options["pipeline"] = wanted["stages"] or options["pipeline"]
    options["tp"] = wanted["tp"] or options["tp"]
    universal = "universal" in wanted["kind"]
    run = engine(options, wanted, seed=1, universal=universal)
    if wanted["trained"]:  # a run that has been going on, as a trainer that rolls back
        train(run, options, 50, 1)
    asked, restored = PROMISES[wanted["restore"]]
    name = f"{wanted['tag']}_universal" if universal else wanted["tag"]
    if wanted["latest"]:
        name = (folder / ("latest_universal" if universal else "latest")).read_text()
    for number in range(wanted["times"]):
        if number:  # a rollback
            train(run, options, 60, 1)
        before = live(run)
        with explored.proof() as proof, dt.model_parallel(run, universal=universal):
            path, _ = run.load_checkpoint(str(folder), tag=None if wanted["latest"] else name, **asked)
        if path is None:
            raise FileNotFoundError("load_checkpoint returns no path")
    if wanted.get("spoil"):  # for tests: what was loaded is changed, or a rank goes nowhere
        explored.spoil(parts(run), wanted["spoil"])
    truths = torch.load(folder / "truth.pt", weights_only=False)
    # After a save in which a rank was killed the tracker names the one before, or this one; else it names the last.
    truth = truths[name.removesuffix("_universal") if case["killed"] else wanted["tag"]]
    found = live(run)
    different = explored.on_any_rank(differences(found, truth["saved"], before, restored))
    if wanted["repaired"]:
        train(run, options, 70, 1)
        return {"different": explored.unrepaired(different, found, truths, case), "proof": proof}
    if different or restored[0] or "losses" not in truth:
        train(run, options, 70, 1)  # whose error is one that somebody gets
        return {"different": different, "proof": proof}
    losses, end = truth["losses"], truth["end"]
    names = ("pipeline", "tp")
    other_layout = wanted["ranks"] != case["ranks"] or any(options[name] != case["run"][name] for name in names)
    if other_layout or wanted["old"]:  # sums are in another order; steps have fixes as well
        reference = engine(options, wanted, seed=2)
        put(reference, options, truth["saved"])
        losses, end = train(reference, options, truth["at"], len(losses)), live(reference)
    differ = ["next loss"] * (train(run, options, truth["at"], len(losses)) != losses)
    later = explored.on_any_rank(explored.different(live(run), end))
    return {"different": differ + [f"later {name}" for name in later], "proof": proof}


def differences(found: State, saved: State, before: State, restored: tuple[str, ...]) -> list[str]:
    """What is not as it was saved, of kinds that are to be restored, and of the others what is not as before."""
    different = []
    for key in sorted({*saved, *found}):
        if not restored[0] or kind_of(key).startswith(restored):
            good = alike(found.get(key), saved.get(key))
        elif kind_of(key) == "fp32":  # with new weights: theirs, or those of the checkpoint
            good = alike(found.get(key), saved.get(key)) or is_weight(found, key)
        else:
            good = alike(found.get(key), before.get(key)) or is_nothing(found.get(key), before.get(key))
        different += [] if good else [key]
    return different


def is_weight(found: State, key: str) -> bool:
    weight = found.get(f"{key.removesuffix('.fp32')}.weight")
    return weight is not None and alike(found[key], weight.float())


def convert(checkpoint: Path, output: Path) -> Options:
    """By DeepSpeed's converter, in a process of its own."""
    try:
        ranks.results(dt.convert_by_upstream, 1, checkpoint, output)
    except ranks.RankError as error:
        return {"error": str(error)}
    return {}


def join(nodes: int, rank: int, count: int, port: int) -> None:
    node = count // nodes
    os.environ["CROSS_RANK"], os.environ["CROSS_SIZE"] = str(rank // node), str(nodes)  # which writers ask for
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
