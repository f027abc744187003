"""The elements of parameters that megatron-core's optimizers hold on this rank."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ckpt_patches.fingerprint.buckets import Laid, Layout, key_of
from ckpt_patches.fingerprint.element_hash import Box
from ckpt_patches.fingerprint.live_state import UNLIKE, Live, Part, dtype_of, in_one_memory
from ckpt_patches.fingerprint.record import Key, Settings, add_settings, settings_of
from ckpt_patches.fingerprint.states import state_named


class Piece(NamedTuple):
    """Contiguous elements of this rank's parameter that are a box of a parameter in the checkpoint."""

    key: str
    begin: int  # index in this rank's parameter
    box: Box


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one parameter of this rank is in the checkpoint."""

    pieces: tuple[Piece, ...]
    replica: tuple[int, ...]  # for pipeline, tensor and data parallelism; all zeros for the first replica
    why_none: str = ""  # why there are no pieces


NO_PLACE = Place((), ())
Places = Mapping[int, Place]  # by the identity of the model's parameter


class Held(NamedTuple):
    """The states that an optimizer holds for one parameter."""

    param: Any  # of the model
    begin: int  # index in the parameter of the states' first element
    states: Mapping[str, torch.Tensor]  # one dimension, equal lengths
    settings: Settings
    own: Mapping[str, torch.Tensor]  # the optimizer's tensors among them, not copies; and a step if it is a tensor
    unlike: Sequence[str]  # names of tensors of other sizes, as the factors of SOAP
    kept_in: Mapping[str, str]  # dtypes in which the optimizer keeps states that it converts when they are read
    is_sharded: bool  # whether data-parallel ranks hold different elements or parameters, not replicas
    replica: int  # of the optimizer itself


Stepping = Mapping[int, tuple[Mapping[str, Any], Mapping[str, Any]]]


# Places


def places(model_sharded_state_dict: Any) -> Places:
    """The places in the checkpoint of the parameters of a model's sharded state dict."""
    found = {}
    for entry in _entries(model_sharded_state_dict):
        if isinstance(entry.data, torch.Tensor):
            found[id(entry.data)] = _place(entry)
    return found


def _entries(value: Any) -> Iterator[Any]:
    """The sharded tensors and factories of a nested state dict."""
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _entries(inner)
    elif hasattr(value, "replica_id") and hasattr(value, "data"):
        yield value


def _place(entry: Any) -> Place:
    """The place of an entry. A factory is built with a meta tensor, whose views show which elements go where."""
    replica = entry.replica_id if isinstance(entry.replica_id, tuple) else (0, 0, entry.replica_id)
    if not hasattr(entry, "build_fn"):
        return Place((Piece(entry.key, 0, _box(entry)),), replica)
    whole = torch.empty(entry.data.shape, device="meta")
    pieces = []
    for made in _entries(dataclasses.replace(entry, data=whole).build()):
        data = made.data
        if data.untyped_storage()._cdata != whole.untyped_storage()._cdata or not data.is_contiguous():
            return Place((), replica, f"{entry.key} is laid out otherwise in checkpoints than in the model")
        pieces.append(Piece(made.key, data.storage_offset(), _box(made)))
    return Place(tuple(pieces), replica)


def _box(entry: Any) -> Box:
    """The box of a sharded tensor; its local shape lacks the axes on which it is stacked."""
    size = (1,) * (len(entry.global_shape) - len(entry.local_shape)) + tuple(entry.local_shape)
    return Box(tuple(entry.global_offset), size, tuple(entry.global_shape))


# Optimizers


def live(optimizer: Any, where: Places) -> Live:
    """The state that an optimizer, or a chain of optimizers, holds on this rank.

    Args:
        optimizer: Megatron's.
        where: the places of its parameters.
    """
    settings: dict[str, Settings] = {}
    tensors: list[tuple[Key, torch.Tensor]] = []
    left_out = {type(leaf).__name__: why for leaf in leaves(optimizer) if (why := _why_none(leaf))}
    for held, place in _placed(optimizer, where):
        if not place.pieces:
            what = place.why_none or f"a parameter of {tuple(held.param.shape)} that is not in the model's state dict"
            left_out[what] = "so its elements have no places"
        for piece in place.pieces:
            add_settings(settings, left_out, piece.key, held.settings)
            left_out |= {f"{piece.key} {state_named(name)}": UNLIKE for name in held.unlike}
        tensors += [((place.pieces[0].key, state_named(name)), its) for name, its in held.own.items() if place.pieces]

    def parts() -> Iterator[Part]:
        for held, place in _placed(optimizer, where):
            for name, values in held.states.items():
                yield from _parts(held, place, name, values)

    return Live(parts, settings, left_out, in_one_memory(tensors), bucket_layouts(optimizer, where))


def bucket_layouts(optimizer: Any, where: Places) -> dict[str, Any]:
    """The layouts of the buffers of distributed optimizers; empty except on each one's first data-parallel rank."""
    found = {}
    of_chain = leaves(optimizer)
    for number, leaf in enumerate(of_chain):
        is_distributed = hasattr(leaf, "gbuf_ranges") and not getattr(leaf, "is_stub_optimizer", False)
        if not is_distributed or _why_none(leaf) or leaf.data_parallel_group.rank():
            continue
        if getattr(leaf, "distributed_optimizer_instance_id", 0):
            continue
        for index, buffer in enumerate(leaf.buffers):
            key = key_of(number if len(of_chain) > 1 else None, leaf.data_parallel_group_idx, index)
            found[key] = _bucket_layout(buffer, where).as_plain()
    return found


def _bucket_layout(buffer: Any, where: Places) -> Layout:
    laid = []
    for param, (begin, _, bucket) in buffer.param_index_map.items():
        place = where.get(id(param), NO_PLACE)
        for piece in place.pieces if not any(place.replica[:-1]) else ():
            at = begin - buffer.buckets[bucket].offset + piece.begin
            laid.append(Laid(bucket, at, piece.key, piece.box))
    return Layout(tuple(bucket.numel_unpadded for bucket in buffer.buckets), tuple(laid))


def leaves(optimizer: Any) -> list[Any]:
    """The optimizers of a chain, or the optimizer itself."""
    return [leaf for one in getattr(optimizer, "chained_optimizers", ()) for leaf in leaves(one)] or (
        [] if hasattr(optimizer, "chained_optimizers") else [optimizer]
    )


def _divided(optimizer: Any) -> set[int]:
    """The identities of the optimizers that divide complete parameters among data-parallel ranks.

    These are the optimizers of a layer-wise distributed optimizer.
    """
    chained = getattr(optimizer, "chained_optimizers", ())
    if getattr(optimizer, "dp_cp_params_list", None) is not None:
        return {id(leaf) for leaf in leaves(optimizer)}
    return {one for inner in chained for one in _divided(inner)}


def _parts(held: Held, place: Place, name: str, values: torch.Tensor) -> Iterator[Part]:
    """The elements of one state, split by the pieces of the parameter."""
    replica = (*place.replica[:-1], held.replica) if held.is_sharded else (*place.replica, held.replica)
    for piece in place.pieces:
        first, last = max(piece.begin, held.begin), min(piece.begin + piece.box.numel, held.begin + len(values))
        if first < last:
            own = values[first - held.begin : last - held.begin]
            part = Part(piece.key, state_named(name), piece.box, first - piece.begin, own, main=not any(replica))
            yield part._replace(kept_in=held.kept_in.get(name, ""))


def _why_none(leaf: Any) -> str:
    if getattr(leaf, "is_stub_optimizer", False):
        return ""
    config = getattr(leaf, "ddp_config", None)
    if getattr(config, "use_megatron_fsdp", False) or getattr(config, "use_custom_fsdp", False):
        return "FSDP's states have no fingerprint"
    if not any(hasattr(leaf, name) for name in ("gbuf_ranges", "fp32_from_float16_groups", "optimizer")):
        return "an optimizer that is not known"
    inner = getattr(leaf, "optimizer", None)
    has_parameters = any(group["params"] for group in getattr(inner, "param_groups", ()))
    if has_parameters and not getattr(inner, "state", None):
        return "it has no state yet"
    return ""


def _placed(optimizer: Any, where: Places) -> Iterator[tuple[Held, Place]]:
    """What the optimizers of a chain hold, and its places. States can be copies, of which one at a time is made."""
    divided = _divided(optimizer)
    for leaf in leaves(optimizer):
        if getattr(leaf, "is_stub_optimizer", False) or _why_none(leaf):
            continue
        is_distributed = hasattr(leaf, "gbuf_ranges")
        for held in _of_distributed(leaf) if is_distributed else _of_whole(leaf, is_sharded=id(leaf) in divided):
            yield held, where.get(id(held.param), NO_PLACE)


def _of_distributed(leaf: Any) -> Iterator[Held]:
    replica = getattr(leaf, "distributed_optimizer_instance_id", 0)
    stepping = {  # the param group and states of each parameter of a hybrid optimizer's inner optimizers
        id(param): (group, inner.state.get(param, {}))
        for inner in getattr(leaf.optimizer, "sub_optimizers", ())
        for group in inner.param_groups
        for param in group["params"]
    }
    for buckets in (buckets for ranges in leaf.gbuf_ranges for buckets in ranges.values()):
        for param, its in (own for bucket in buckets for own in bucket["param_map"].items()):
            begin, numel = its["param"].start, its["param"].end - its["param"].start
            yield _held_of(param, begin, numel, *_of_shard(leaf, param, stepping), is_sharded=True, replica=replica)


def _of_whole(leaf: Any, *, is_sharded: bool) -> Iterator[Held]:
    """The states of an optimizer that has complete parameters: all, or those that this data-parallel rank updates."""
    both = zip(getattr(leaf, "float16_groups", ()), getattr(leaf, "fp32_from_float16_groups", ()), strict=True)
    models = {id(main): param for pair in both for param, main in zip(*pair, strict=True)}
    for group in leaf.optimizer.param_groups:
        for main in group["params"]:
            param, states = models.get(id(main), main), {"param": main, **leaf.optimizer.state.get(main, {})}
            yield _held_of(param, 0, main.numel(), group, states, {}, is_sharded=is_sharded, replica=0)


def _of_shard(leaf: Any, param: Any, stepping: Stepping) -> tuple[Mapping[str, Any], Mapping[str, Any], dict[str, str]]:
    """The param group, the states, and the dtypes in which a precision-aware optimizer, which returns fp32, keeps them.

    They are those of the optimizer that steps: for a hybrid one, the inner one on the CPU or GPU.
    """
    index, order = leaf.model_param_group_index_map[param]
    group = leaf.optimizer.param_groups[index]
    main = group["params"][order]
    if not hasattr(leaf.optimizer, "sub_optimizers"):
        kept = {
            n: dtype_of(its) for n, its in leaf.optimizer.state.get(main, {}).items() if isinstance(its, torch.Tensor)
        }
        return group, leaf._get_main_param_and_optimizer_states(param), kept
    inner = leaf.optimizer.param_to_inner_param[main]
    own, states = stepping.get(id(inner), ({}, {}))
    # A step begins by copying these settings to the inner optimizer, as a scheduler may have changed them; not `step`.
    group = {**own, **{name: value for name, value in group.items() if name != "step"}}
    return group, {"param": inner, **{name: its for name, its in states.items() if name != "master_param"}}, {}


def _held_of(
    param: Any,
    begin: int,
    numel: int,
    group: Mapping[str, Any],
    states: Mapping[str, Any],
    kept_in: Mapping[str, str],
    **what: Any,
) -> Held:
    """The states of all elements. Tensors of one element are counters or scales."""
    tensors = {name: value.detach() for name, value in states.items() if isinstance(value, torch.Tensor)}
    flat = {
        name: its.reshape(-1)
        for name, its in tensors.items()
        if name != "step" and its.numel() == numel and its.is_floating_point()
    }
    own = {name: its for name, its in flat.items() if kept_in.get(name, dtype_of(its)) == dtype_of(its)}
    own |= {name: its for name, its in tensors.items() if name == "step"}
    unlike = [name for name, its in tensors.items() if its.numel() > 1 and name not in {*flat, "step"}]
    return Held(param, begin, flat, settings_of(group, states), own, unlike, kept_in, **what)
