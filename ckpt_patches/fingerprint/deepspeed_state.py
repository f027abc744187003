"""The elements of parameters that DeepSpeed's optimizers hold on this rank.

They are read from the flat partitions that the optimizer steps, not from DeepSpeed's links to fragments of them.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import torch

from ckpt_patches.fingerprint.element_hash import all_of
from ckpt_patches.fingerprint.live_state import UNLIKE, Live, Part, dtype_of, in_one_memory, persistent_buffers
from ckpt_patches.fingerprint.proof import rank_in
from ckpt_patches.fingerprint.record import BUFFER, Key, Settings, add_settings, plain_values, settings_of
from ckpt_patches.fingerprint.states import FROZEN, IN_A_RUN

PART_UNKNOWN = "with tensor parallelism DeepSpeed does not record which part of a parameter a rank has"
EXPERT = "an expert that is not deepspeed.moe's, of which the number among all is not known"
# An expert by its local number on its rank; a converted checkpoint has all experts, by their global numbers.
LOCAL_EXPERT = re.compile(r"(?P<before>^|.*\.)deepspeed_experts\.(?P<number>\d+)\.")
SCHEDULER = "learning-rate scheduler"
COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class Slice(NamedTuple):
    """Contiguous elements of a parameter that this rank steps."""

    param: Any  # of the model
    shape: tuple[int, ...]  # of the full parameter
    first: int  # index of the first element in the flattened parameter
    numel: int
    at: int  # index of the first element in the flat tensors


class Flat(NamedTuple):
    """A tensor that an optimizer steps, with its states."""

    values: torch.Tensor
    states: Mapping[str, Any]
    group: Mapping[str, Any]  # empty for a frozen parameter, and for states on a disk
    slices: list[Slice]
    among: list[Slice]  # also those without elements on this rank


def live(engine: Any, *, scheduler: bool = True) -> Live:
    """The state of an engine on this rank: its optimizer's states, frozen parameters, and non-parameter state.

    Args:
        engine: DeepSpeed's.
        scheduler: whether to include the learning-rate scheduler.
    """
    settings: dict[str, Settings] = {}
    left_out = dict(_left_out(engine))
    tensors: list[tuple[Key, torch.Tensor]] = []
    parts: list[Part] = []
    names = _names(engine.module)
    flats = [] if left_out else list(_flats(engine.optimizer, names))
    flats += [] if left_out else list(_frozen(engine, flats, names, left_out))
    for flat in flats:
        if not flat.slices:
            left_out |= {names[id(own.param)]: "its states are on a disk" for own in flat.among if not flat.group}
        states = {"master" if flat.group else FROZEN: flat.values, **flat.states}
        states = {name: its.detach() for name, its in states.items() if isinstance(its, torch.Tensor)}
        alike = {name: its.reshape(-1) for name, its in states.items() if _is_alike(name, its, flat)}
        for own in flat.slices:
            name = names[id(own.param)]
            left_out |= {f"{name} {state}": UNLIKE for state in states.keys() - alike.keys() - {"step"}}
            if _is_expert(own.param) and "deepspeed_experts.global_" not in name:
                left_out[name] = EXPERT
                continue
            if flat.group:
                add_settings(settings, left_out, name, settings_of(flat.group, flat.states))
            is_main = not getattr(
                own.param, "ds_pipe_replicated", False
            )  # else another stage of a pipeline has it, too
            for state, values in alike.items():
                cut = values[own.at : own.at + own.numel]
                parts.append(Part(name, state, all_of(own.shape), own.first, cut, is_main))
        if flat.slices and flat.group:
            tensors += [((names[id(flat.slices[0].param)], state), value) for state, value in states.items()]
    return Live(lambda: parts, settings, left_out, in_one_memory(tensors), others=_others(engine, scheduler=scheduler))


def _frozen(engine: Any, flats: Iterable[Flat], names: Mapping[int, str], left_out: dict[str, str]) -> Iterator[Flat]:
    """The parameters that no optimizer steps; adds to `left_out` why some of them cannot be read."""
    stepped = {id(own.param) for flat in flats for own in flat.among}
    for param in engine.module.parameters():
        if id(param) in stepped:
            continue
        values = getattr(param, "ds_tensor", param).detach()
        dtype = dtype_of(values)
        if "NOT_AVAILABLE" in str(getattr(getattr(param, "ds_tensor", param), "status", "")):
            left_out[names[id(param)]] = "frozen, on a disk"
        elif dtype not in IN_A_RUN:
            left_out[names[id(param)]] = f"frozen, in {dtype}"
        else:
            is_partition = hasattr(param, "ds_tensor")
            slices = [_partition(param, engine.optimizer, 0)] if is_partition else _in_a_row([param])
            yield Flat(values, {}, {}, [own for own in slices if own.numel], [])


def _is_alike(state: str, tensor: torch.Tensor, flat: Flat) -> bool:
    """Whether a state has one element per element of the flat tensor; NAdam's `mu_product` is a scalar."""
    is_number = tensor.dim() < min(1, flat.values.dim())
    return not is_number and tensor.numel() == flat.values.numel() and tensor.is_floating_point() and state != "step"


def _others(engine: Any, *, scheduler: bool) -> dict[str, Settings]:
    """The state besides parameters and optimizer states, by its name in messages; of buffers, digests."""
    found: dict[str, Settings] = {
        f"{BUFFER}{name}": {"value": _digest(one)} for name, one in persistent_buffers(engine.module)
    }
    if scheduler and engine.lr_scheduler is not None:
        found[SCHEDULER] = plain_values(engine.lr_scheduler.state_dict())
    if hasattr(engine.optimizer, "optimizer"):  # without ZeRO or 16-bit training there is no scale
        found["loss scale"] = _loss_scale(engine.optimizer)
    found["counters"] = {name: getattr(engine, name) for name in COUNTERS}
    return {what: its for what, its in found.items() if its}


def _digest(buffer: torch.Tensor) -> str:
    """A digest of a buffer's shape, dtype and bytes."""
    values = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    found = hashlib.blake2b(f"{buffer.dtype} {tuple(buffer.shape)}".encode(), digest_size=8)
    found.update(memoryview(values.numpy()) if values.numel() else b"")
    return found.hexdigest()


def _loss_scale(optimizer: Any) -> Settings:
    scaler = getattr(optimizer, "loss_scaler", getattr(optimizer, "loss_scale_config", optimizer))
    values = {"scale": getattr(optimizer, "loss_scale", None), "steps": getattr(scaler, "cur_iter", None)}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _left_out(engine: Any) -> Iterator[tuple[str, str]]:
    """The reasons if no parameter can be fingerprinted."""
    mpu = getattr(engine, "mpu", None)
    sizes = ("get_tensor_model_parallel_world_size", "get_slice_parallel_world_size")
    size = next((getattr(mpu, name) for name in sizes if hasattr(mpu, name)), None)
    if size is not None and size() > 1:
        yield "the optimizer's state", PART_UNKNOWN
    elif engine.optimizer is None:
        yield "the optimizer's state", "the engine has no optimizer"
    elif not any(hasattr(engine.optimizer, name) for name in (*KINDS, "param_groups")):
        yield type(engine.optimizer).__name__, "an optimizer that is not known"


def _names(module: Any) -> dict[int, str]:
    """The names that a converter gives to the parameters, by the parameters' identity."""
    found = {id(param): name for name, param in module.named_parameters()}
    experts = {}
    for param in module.parameters():
        if _is_expert(param) and (place := LOCAL_EXPERT.match(found[id(param)])):
            experts[id(param)] = param, place
    counts: dict[str, int] = {}  # number of experts on this rank, by layer
    for _, place in experts.values():
        counts[place["before"]] = max(counts.get(place["before"], 0), int(place["number"]) + 1)
    for key, (param, place) in experts.items():
        from deepspeed.utils import groups

        first = groups._get_expert_parallel_rank(param.group_name) * counts[place["before"]]
        number = f"deepspeed_experts.global_{first + int(place['number'])}."
        found[key] = f"{place['before']}{number}{found[key][place.end() :]}"
    return found


def _is_expert(param: Any) -> bool:
    return not getattr(param, "allreduce", True)


# Optimizers


def _flats(optimizer: Any, names: Mapping[int, str]) -> Iterator[Flat]:
    for attribute, flats in KINDS.items():
        if hasattr(optimizer, attribute):
            yield from flats(optimizer)
            return
    yield from _of_torch(optimizer, names)


def _of_stage_1_and_2(optimizer: Any) -> Iterator[Flat]:
    """With `round_robin_gradients` the order differs from that of DeepSpeed's links."""
    offsets = getattr(optimizer, "round_robin_bit16_offsets", None)  # since 0.19.3, with padding between parameters
    yield from _of_shares(
        optimizer, optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups, offsets
    )


def _of_bf16(optimizer: Any) -> Iterator[Flat]:
    yield from _of_shares(optimizer, optimizer.bf16_groups, optimizer.fp32_groups_flat_partition)


def _of_shares(optimizer: Any, groups: Any, partitions: Any, offsets: Any = None) -> Iterator[Flat]:
    """Each group is one buffer of its parameters in flattened order; each rank has an equal partition of it."""
    for number, (params, partition) in enumerate(zip(groups, partitions, strict=True)):
        size = partition.numel()
        begin = rank_in(optimizer.real_dp_process_group[number]) * size
        places = offsets[number] if offsets else [own.at for own in _in_a_row(params)]
        slices = []
        for param, at in zip(params, places, strict=True):
            low, high = max(at, begin), min(at + param.numel(), begin + size)
            slices.append(Slice(param, tuple(param.shape), low - at, max(high - low, 0), low - begin))
        yield _flat(optimizer.optimizer, number, partition, slices)


def _of_stage_3(optimizer: Any) -> Iterator[Flat]:
    """Each parameter is divided evenly among the ranks; the partitions of the last ranks end with padding."""
    for number, (params, flat) in enumerate(
        zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    ):
        sizes = [param.partition_numel() for param in params]
        slices = [_partition(*own) for own in zip(params, repeat(optimizer), accumulate(sizes, initial=0))]
        if flat.numel():
            yield _flat(optimizer.optimizer, optimizer.sub_group_to_group_id[number], flat, slices)
        else:  # it is offloaded
            yield Flat(flat, {}, {}, [], slices)


def _partition(param: Any, optimizer: Any, at: int) -> Slice:
    """A rank's partition of a parameter of stage 3, which begins at an index of a flat tensor."""
    numel = param.partition_numel()
    first = rank_in(getattr(param, "ds_process_group", optimizer.dp_process_group)) * numel
    return Slice(param, tuple(param.ds_shape), first, max(min(numel, param.ds_numel - first), 0), at)


def _of_fused(optimizer: Any) -> Iterator[Flat]:
    """16-bit training without ZeRO: each group is one tensor."""
    for number, (params, flat) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)):
        yield _flat(optimizer.optimizer, number, flat, _in_a_row(params))


def _of_unfused(optimizer: Any) -> Iterator[Flat]:
    for number, (params, masters) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)):
        for param, master in zip(params, masters, strict=True):
            yield _flat(optimizer.optimizer, number, master, _in_a_row([param]))


def _of_torch(optimizer: Any, names: Mapping[int, str]) -> Iterator[Flat]:
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) in names:
                yield _flat(optimizer, number, param, _in_a_row([param]))


def _in_a_row(params: Iterable[Any]) -> list[Slice]:
    slices, at = [], 0
    for param in params:
        slices.append(Slice(param, tuple(param.shape), 0, param.numel(), at))
        at += param.numel()
    return slices


def _flat(inner: Any, number: int, values: Any, slices: list[Slice]) -> Flat:
    own = [one for one in slices if one.numel]
    return Flat(values, inner.state.get(values, {}), inner.param_groups[number], own, slices)


# By an attribute that only this kind of optimizer has, in lookup order.
KINDS = {
    "single_partition_of_fp32_groups": _of_stage_1_and_2,
    "fp32_groups_flat_partition": _of_bf16,
    "fp32_partitioned_groups_flat": _of_stage_3,
    "fp32_groups_flat": _of_fused,
    "fp32_groups": _of_unfused,
}
