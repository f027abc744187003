"""The state of a run of Megatron, read from the optimizers' memory without any sharded state dict."""

import copy
import re
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainers import judge
from trainers.judge import Part, State

Options = dict[str, Any]
NO_SETTINGS = ("params", "step", "offload_fraction")  # keys of a param group; the last belongs to the optimizer


class Run(NamedTuple):
    model: Any  # under Megatron's DDP
    optimizer: Any
    scheduler: Any  # or None


def place(model: Any, name: str, parameter: torch.Tensor) -> tuple[str, torch.Tensor, int]:
    """Return a local parameter's name in the full model, the indices of its elements there, and its full size."""
    from megatron.core import parallel_state

    network = model.module
    if name == "output_layer.weight" and network.share_embeddings_and_output_weights:
        name = "embedding.word_embeddings.weight"
    if found := re.match(r"(decoder\.layers\.)(\d+)(.*)", name):
        number = network.decoder.layers[int(found[2])].layer_number - 1
        name = f"{found[1]}{number}{found[3]}"
    if found := re.match(r"(.*\.local_experts\.)(\d+)(.*)", name):
        config, rank = network.config, parallel_state.get_expert_model_parallel_rank()
        own = config.num_moe_experts // config.expert_model_parallel_size
        name = f"{found[1]}{rank * own + int(found[2])}{found[3]}"
    if isinstance(parameter, DTensor):  # a part of the rows
        size, rank = dist.get_world_size(), dist.get_rank()
        index = torch.arange(parameter.numel()).view(parameter.shape).chunk(size)
        return name, index[rank].flatten() if rank < len(index) else index[0][:0].flatten(), parameter.numel()
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    if not getattr(parameter, "tensor_model_parallel", False) or size == 1:
        return name, torch.arange(parameter.numel()), parameter.numel()
    axis = parameter.partition_dim
    parts = 2 if ".linear_fc1." in name and network.config.gated_linear_unit else 1  # W and V
    shape = list(parameter.shape)
    shape[axis : axis + 1] = [parts, size * shape[axis] // parts]
    index = torch.arange(parameter.numel() * size).view(shape)
    return name, index.chunk(size, axis + 1)[rank].flatten(), parameter.numel() * size


def part_here(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that FSDP2 has sharded, or the tensor itself."""
    return value.to_local() if isinstance(value, DTensor) else value


def places(run: Run) -> dict[int, tuple[str, torch.Tensor, int]]:
    """Return the place of each parameter by its `id`."""
    return {id(own): place(run.model, name, own) for name, own in run.model.module.named_parameters()}


class Held(NamedTuple):
    """The part of a model parameter that an optimizer holds."""

    parameter: Any
    begin: int  # the parameter's first element in the states
    states: dict[str, torch.Tensor]  # flat
    settings: Options  # from its param group
    step: Any


def leaves(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [leaf for one in chained for leaf in leaves(one)]


def held(optimizer: Any) -> Iterator[Held]:
    for leaf in leaves(optimizer):
        if getattr(leaf, "optimizer", None) is None or getattr(leaf, "is_stub_optimizer", False):
            continue
        groups = [(one, group) for group in leaf.optimizer.param_groups for one in group["params"]]
        group_of = {id(one): group for one, group in groups}
        for parameter, begin, stepped in _pairs(leaf):
            group = group_of[id(stepped)]
            main, state = _inner(leaf.optimizer, stepped)
            own = {"fp32": state.get("master_param", main.float()), **state}
            if main is not stepped and stepped.dtype == torch.float32:
                own["copy"] = stepped  # the copy of a main parameter on the CPU
            states = {
                name: part_here(value.detach()).view(-1)
                for name, value in own.items()
                if isinstance(value, torch.Tensor) and value.dim() and name != "master_param"
            }
            settings = {name: value for name, value in group.items() if name not in NO_SETTINGS}
            yield Held(parameter, begin, states, settings, state.get("step"))


def _pairs(leaf: Any) -> Iterator[tuple[Any, int, Any]]:
    """Yield each model parameter, an offset, and the tensor that the optimizer steps for the elements from there on."""

    def pairs(*groups: Any) -> Iterator[tuple[Any, ...]]:
        return (pair for of_group in zip(*groups, strict=True) for pair in zip(*of_group, strict=True))

    if hasattr(leaf, "model_float16_groups"):  # distributed: this rank has ranges of some parameters
        mains = leaf.shard_fp32_from_float16_groups  # all None in the precision-aware optimizer
        found = [
            *((own, shard if main is None else main) for own, main, shard in
              pairs(leaf.model_float16_groups, mains, leaf.shard_float16_groups)),
            *pairs(leaf.model_fp32_groups, leaf.shard_fp32_groups),
        ]  # fmt: skip
        yield from ((own, leaf._get_model_param_range_map(own)["param"].start, stepped) for own, stepped in found)
    elif hasattr(leaf, "fp32_from_float16_groups"):
        of_16_bits = pairs(leaf.float16_groups, leaf.fp32_from_float16_groups)
        alone = pairs(leaf.fp32_from_fp32_groups, leaf.fp32_from_fp32_groups)
        yield from ((own, 0, stepped) for own, stepped in [*of_16_bits, *alone])
    else:
        yield from ((own, 0, own) for group in leaf.optimizer.param_groups for own in group["params"])


def _inner(optimizer: Any, stepped: Any) -> tuple[Any, State]:
    """Return the tensor that the inner optimizer steps, with its state and step. CPU offload has several optimizers."""
    if not hasattr(optimizer, "sub_optimizers"):
        (group,) = (group for group in optimizer.param_groups if any(stepped is one for one in group["params"]))
        return stepped, {**optimizer.state.get(stepped, {}), **_counted_by_group(optimizer, group)}
    main = optimizer.param_to_inner_param[stepped]
    for one in optimizer.sub_optimizers:
        for group in one.param_groups:
            if any(main is parameter for parameter in group["params"]):
                return main, {**one.state.get(main, {}), **_counted_by_group(one, group)}
    raise AssertionError("an optimizer of CPU offload steps none of its parameters")


def _counted_by_group(optimizer: Any, group: Options) -> Options:
    """Return the group's step. Apex and Transformer Engine count steps per group, and torch counts per parameter."""
    return {"step": group["step"]} if "step" in group and "torch.optim" not in type(optimizer).__module__ else {}


def parts(run: Run) -> Iterator[Part]:
    """Yield the parts of weights, main parameters and optimizer states."""
    of_parameters = places(run)
    for parameter in run.model.module.parameters():
        named, where, numel = of_parameters[id(parameter)]
        yield Part(f"{named}.weight", part_here(parameter.data).view(-1), where, numel)
    for one in held(run.optimizer):
        named, where, numel = of_parameters[id(one.parameter)]
        for name, local in one.states.items():
            yield Part(f"{named}.{name}", local, where[one.begin : one.begin + local.numel()], numel)


def live(run: Run) -> State:
    """Return everything that the next steps depend on. It is the same on each rank if the state is correct."""
    names = {own: name for own, (name, *_) in places(run).items()}
    settings: State = {}
    for one in held(run.optimizer):
        name = names[id(one.parameter)]
        settings |= {f"setting {name}.{key}": copy.deepcopy(value) for key, value in one.settings.items()}
        settings[f"step {name}"] = None if one.step is None else float(one.step)
    found: State = {}
    for of_rank in [*judge.gathered(settings), settings]:
        found |= of_rank
    for scaler in _scalers(run)[:1]:  # all scalers of a chain are equal
        found |= {f"scaler.{name}": value for name, value in _numbers(scaler).items()}
    if run.scheduler:
        found |= {f"scheduler.{name}": value for name, value in _numbers(run.scheduler).items()}
    return judge.whole(judge.of_ranks(parts(run))) | {name: value for name, value in found.items() if value is not None}


def complete(run: Run, options: Options) -> State:
    """Return `live`, and each rank's RNG states as checksums if megatron.training saves them."""
    if not options["trainer"]:
        return live(run)
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = {"torch": torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    own = {f"rng of rank {dist.get_rank()} {name}": zlib.crc32(state.numpy()) for name, state in states.items()}
    return live(run) | {name: value for of_rank in judge.gathered(own) for name, value in of_rank.items()}


def _scalers(run: Run) -> list[Any]:
    return [leaf.grad_scaler for leaf in leaves(run.optimizer) if getattr(leaf, "grad_scaler", None)]


def _numbers(one: Any) -> Options:
    found = {name: value for name, value in vars(one).items() if name != "bounds_may_be_loaded"}  # a fix sets it
    found = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in found.items()}
    return {name: value for name, value in found.items() if isinstance(value, (bool, int, float))}


def put(run: Run, state: State) -> None:
    """Set a run's memory to a state, for which it must have trained. It continues as after a correct load."""
    judge.put((part for part in parts(run) if part.name in state), state)
    names = {own: name for own, (name, *_) in places(run).items()}
    for leaf in leaves(run.optimizer):
        steps = [state.get(f"step {names[id(one.parameter)]}") for one in held(leaf)]
        _set_step(leaf, max(filter(None, steps), default=0))
    _set_settings(run, names, state)
    for what, owners in (("scaler", _scalers(run)), ("scheduler", [run.scheduler] if run.scheduler else [])):
        for owner in owners:
            for name in _numbers(owner):
                own, value = getattr(owner, name), state[f"{what}.{name}"]
                setattr(owner, name, torch.full_like(own, value) if isinstance(own, torch.Tensor) else value)


def _set_step(leaf: Any, number: float) -> None:
    """Set the step in every place where the optimizer counts it."""
    if getattr(leaf, "optimizer", None) is None:
        return
    optimizers = [leaf.optimizer, *getattr(leaf.optimizer, "sub_optimizers", ())]
    for own in [own for optimizer in optimizers for own in optimizer.state.values() if "step" in own]:
        own["step"] = torch.full_like(own["step"], number)
    for group in [group for optimizer in optimizers for group in optimizer.param_groups if "step" in group]:
        group["step"] = int(number)


def _set_settings(run: Run, names: dict[int, str], state: State) -> None:
    for leaf in leaves(run.optimizer):
        if getattr(leaf, "optimizer", None) is None:
            continue
        for parameter, _, stepped in _pairs(leaf):
            for group in leaf.optimizer.param_groups:
                if any(one is stepped for one in group["params"]):
                    prefix = f"setting {names[id(parameter)]}."
                    group.update({key: state[prefix + key] for key in group if prefix + key in state})


def kind_of(name: str) -> str:
    """Return the kind of an entry, such as weight, fp32 (a main parameter), copy, state, setting or rng."""
    first = re.split(r"[ .]", name)[0]
    if first in ("setting", "step", "scaler", "scheduler", "rng"):
        return first
    last = name.rpartition(".")[2]
    return last if last in ("weight", "fp32", "copy") else "state"
