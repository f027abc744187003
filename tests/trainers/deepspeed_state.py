"""The state of a run of DeepSpeed, read from the optimizer's memory without any accessor of DeepSpeed or ours."""

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from deepspeed.utils import groups as expert_groups

from trainers import judge
from trainers.judge import Part, State, alike
from trainers.ranks import gathered

MOMENTUM = "momentum_buffer"
OF_LAYOUT = ("params", "name")  # keys of a param group; an expert group's name depends on the ranks
NUMBERS = {"steps": "step", "products": "mu_product"}  # states of each parameter; NAdam has `mu_product`
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
# Each tensor-parallel rank has a slice of these parameters. The values are the axis and the full shape.
SLICED = {
    "up.weight": (0, (24, 8)), "up.bias": (0, (24,)), "norm.weight": (0, (24,)), "norm.bias": (0, (24,)),
    "down.weight": (1, (8, 24)),
}  # fmt: skip


def live(run: Any) -> State:
    """Return everything that the next steps depend on: full tensors and other values.

    The result is the same on each rank if the state is correct.

    Elements that no rank has are NaN.
    """
    of_ranks = judge.of_ranks(in_fp32(part) for part in parts(run))
    found = judge.whole(of_ranks)
    for name in unlike(of_ranks):
        del found[name]
        found |= {f"{name} on rank {rank}": own[name] for rank, own in enumerate(map(wholes, of_ranks)) if name in own}
    inner = inner_optimizer(run)
    own: State = {}
    for number, group in enumerate(inner.param_groups):
        values = {key: copy.deepcopy(value) for key, value in group.items() if key not in OF_LAYOUT}
        own |= {f"{name}.{key}": value for name in group_names(run, number) for key, value in values.items()}
    for of_rank in [*gathered(own), own] if hasattr(run, "grid") else [own]:  # each stage has its own groups
        found |= of_rank
    for key, state in NUMBERS.items():
        found[key] = sorted({one for of_rank in gathered(_of_states(run, inner, state)) for one in of_rank})
    found |= {f"counter {name}": getattr(run, name) for name in COUNTERS}
    for what, of in SETTINGS.items():
        found |= {f"{what}.{name}": value for name, value in of(run).items()}
    return found


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
    layers = [module for module in run.module.modules() if isinstance(module, MoE)]
    first = 0
    if layers:
        first = layers[0].num_local_experts * expert_groups._get_expert_parallel_rank(layers[0].expert_group_name)
    return {parameter: numbered(name, first) for name, parameter in run.module.named_parameters()}


def numbered(name: str, first: int) -> str:
    """The name with the expert's global number in place of its local one; `first` is the rank's first expert."""
    return re.sub(r"(deepspeed_experts\.)(\d+)", lambda match: f"{match[1]}{first + int(match[2])}", name)


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
    """The object with the loss scale's counters; without ZeRO the optimizer, or since 0.18.6 its config object."""
    own = run.optimizer
    if not hasattr(own, "overflow"):
        return None
    return getattr(own, "loss_scaler", getattr(own, "loss_scale_config", own))


# The numeric attributes of the loss scaler and of the learning-rate scheduler.
OF_SCALER = re.compile(r"cur_|last_overflow|(loss_)?scale$")
SETTINGS: dict[str, Callable[[Any], State]] = {
    "scaler": lambda run: _numbers(_scaler(run), OF_SCALER),
    "scheduler": lambda run: _numbers(run.lr_scheduler, re.compile("")),
}


def _numbers(one: Any, names: re.Pattern[str]) -> State:
    values = vars(one).items() if one else ()
    return {name: value for name, value in values if isinstance(value, (bool, int, float)) and names.match(name)}


def put(run: Any, state: State) -> None:
    """Set a run's memory to a state, for which it must have trained. It continues as after a correct load."""
    judge.put(parts(run), state)
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


def kind_of(name: str) -> str:
    """Return the kind of an entry: weight, buffer, fp32 (a main parameter), state, group, steps, counter, scaler, …"""
    first = name.split(" ")[0].split(".")[0] if name.startswith(("buffer ", "group ", "counter ")) else ""
    if first or name in NUMBERS or name.startswith(("scaler.", "scheduler.")):
        return first or name.split(".")[0]
    last = name.rpartition(".")[2]
    return last if last in ("weight", "fp32") else "state"


def is_weight(found: State, key: str) -> bool:
    """Return whether a main parameter is its weight."""
    weight = found.get(f"{key.removesuffix('.fp32')}.weight")
    return weight is not None and alike(found[key], weight.float())
