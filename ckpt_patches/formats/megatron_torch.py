"""Megatron's `torch` format: a folder per tensor-parallel rank, with its model and the gathered optimizer state.

`mp_rank_*/distrib_optim.pt` holds the states of each bucket of many parameters, nested by optimizer, buffer, dtype and
bucket. `mp_rank_*/model_optim_rng.pt` holds the model's weights and the optimizer's param groups.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_patches.errors import UserError
from ckpt_patches.formats import damages, settings, tensor_streams, torch_file
from ckpt_patches.formats.checkpoint import WEIGHT, Checkpoint, Shard
from ckpt_patches.formats.checksum import of_zeros
from ckpt_patches.formats.chunked import ALIGNMENT, Chunked, Object, shards_of
from ckpt_patches.formats.megatron_arrays import (
    STATES,
    by_parameter,
    check_promises,
    check_siblings,
    param_groups,
    set_common,
    set_run,
)
from ckpt_patches.formats.torch_file import TensorHeader, tensors_in
from ckpt_patches.runtime.shown import shown

OPTIMIZER, MODEL = "distrib_optim.pt", "model_optim_rng.pt"
NAMES = ("param", "exp_avg", "exp_avg_sq")
COALESCED, UNPADDED = "buckets_coalesced", "numel_unpadded"
BUCKET_SIZES = "per_bucket_numel"
MOST_DEPTH = 5  # of chained optimizers
RANK = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")  # tensor-, pipeline-, expert-parallel


def folders(path: Path) -> list[Path]:
    """The folders of the tensor-parallel ranks, or `path` if it is one; empty if `path` has another format."""
    if (path / OPTIMIZER).exists():
        return [path]
    found = sorted(path.glob("mp_rank_*"))
    return found if any((folder / OPTIMIZER).exists() for folder in found) else []


def is_without_distributed_optimizer(path: Path) -> bool:
    """Whether no rank has `distrib_optim.pt`, and the run's arguments disable the distributed optimizer."""
    found = sorted(path.glob("mp_rank_*"))
    if not found or any((own / OPTIMIZER).exists() or not (own / MODEL).exists() for own in found):
        return False
    with contextlib.suppress(UserError):
        value = torch_file.read(found[0] / MODEL, trust=True).value  # runs no code: unknown classes are stubs
        arguments = value.get("args") if isinstance(value, dict) else None
        return isinstance(arguments, torch_file.Instance) and arguments.fields.get("use_distributed_optimizer") is False
    return False


class _Rank(NamedTuple):
    """The facts that a model-parallel rank's folder states."""

    label: str
    keys: frozenset[str]  # of the model's file
    groups: list[dict[str, Any]]  # param groups
    has_states: bool


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint, with findings for the problems of its files."""
    found = Checkpoint(path, "megatron torch")
    ranks = [_read_rank(found, folder, "" if folder == path else folder.name) for folder in folders(path)]
    _check_ranks(found, list(filter(None, ranks)))
    _check_copies(found)
    check_promises(found, ())
    return found


def _read_rank(found: Checkpoint, folder: Path, label: str) -> _Rank | None:
    """Add the facts and the buckets of a folder. Returns None if one of its files is missing or cannot be read.

    The weights are judged with all tensors.
    """
    before, where = len(found.groups), f"{label}/{MODEL}".lstrip("/")
    model, states = (tensor_streams.read(folder / name, found) for name in (MODEL, OPTIMIZER))
    numel = judge_buckets(found, folder / OPTIMIZER, label, states)
    if model is not None:
        set_common(found, model, where)
    if not isinstance(model, dict) or states is None:
        return None
    weights = [tensor for key, own in model.items() if str(key).startswith("model") for _, tensor in tensors_in(own)]
    check_weights(found, where, max(numel, 1), [weight.numel for weight in weights])
    has_states = any(shard.label == label for shard in found.shards)
    return _Rank(label, frozenset(map(str, model)), found.groups[before:], has_states)


def check_weights(found: Checkpoint, where: str, expected: int, weights: list[int]) -> None:
    """Check that a rank's weights have at least `expected` elements. `weights` has the count of each."""
    there = sum(-(-numel // ALIGNMENT) * ALIGNMENT for numel in weights)  # the most that they take in their buckets
    if there < expected:
        detail = f"expected {expected} elements at least, as the optimizer has, found {there} in {len(weights)} tensors"
        found.add(damages.MISSING_WEIGHT, where, detail)


def judge_contents(
    found: Checkpoint, arrays: Mapping[str, Chunked], objects: Mapping[str, Object], dtypes: Mapping[str, str]
) -> list[int]:
    """Add the shards and findings of what zarr and torch_dist hold: arrays, and objects or lists of one.

    Objects have bucket states, bucket sizes and param groups. `dtypes` has also the arrays that are not read. Returns
    the numbers of elements, without padding, that the objects state for the buckets.
    """
    numels = []
    for name, own in objects.items():
        value = own.value[0] if isinstance(own.value, list) and len(own.value) == 1 else own.value
        numels.append(judge_buckets(found, Path(own.extent.path), "", value, name))
        if groups := param_groups(value):
            set_run(found, groups, None)
        key, _, shard = name.partition("/")
        other = objects.get(f"{key}_unpadded/{shard}") if key.endswith(f".{BUCKET_SIZES}") else None
        if other is not None and None not in (own.value, other.value):  # `dp_reshardable` saves both
            sizes, unpadded = dict(_sizes(own.value)), dict(_sizes(other.value))
            numels[-1] += sum(unpadded.values())
            if sizes.keys() != unpadded.keys() or any(sizes[at] < unpadded[at] for at in sizes):
                detail = "the buckets, or their sizes with and without padding, are not those of each other"
                found.add(damages.CONTRADICTION, key, detail)
    check_siblings(found, dtypes)
    for parameter, roles in by_parameter(arrays).items():
        weight = roles.get(WEIGHT)
        own_shapes = {role: own.unflattened(weight.tensor.size) if weight else own for role, own in roles.items()}
        found.shards += shards_of(found, parameter, own_shapes)
    check_promises(found, dtypes)
    return numels


def _sizes(value: Any, place: str = "") -> Iterator[tuple[str, int]]:
    """The numbers in a nested value by their place; anything else counts as 0."""
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _sizes(inner, f"{place}.{key}")
    else:
        yield place, value if type(value) is int else 0


def judge_buckets(found: Checkpoint, path: Path, label: str, value: Any, prefix: str = "") -> int:
    """Add a shard for each bucket in a file's value. Returns the elements without padding that the file states."""
    buckets: dict[str, dict[str, TensorHeader]] = {}
    for name, tensor in tensors_in(value):
        bucket, _, state = name.rpartition(".")
        if state in NAMES:
            buckets.setdefault(bucket, {})[state] = tensor
    for place, states in buckets.items():
        name = f"{prefix}.{place}".strip(".")
        tensors = {role: states[key] for key, role in STATES.items() if key in states}
        sizes = {tensor.numel for tensor in tensors.values()}
        if len(sizes) != 1 or len(tensors) != len(NAMES):
            detail = ", ".join(f"{role}: {tensor.numel}" for role, tensor in tensors.items())
            found.add(damages.MISSING_ARRAY, name, detail, shard=label)
        streams = tensor_streams.streams(found, path, name, tensors)
        if len(sizes) == 1:
            found.shards.append(Shard(name, label, (sizes.pop(),), streams, has_rows=False))
    unpadded = 0
    for own in _coalesced(value):
        numel, of_states = (
            own.get(UNPADDED),
            [own[key].numel for key in NAMES if isinstance(own.get(key), TensorHeader)],
        )
        unpadded += numel if type(numel) is int else 0
        if any(there != numel for there in of_states):
            detail = f"{UNPADDED} is {shown(numel)}, of states with {of_states[0]} elements"
            found.add(damages.CONTRADICTION, f"{prefix} {UNPADDED}".strip(), detail, shard=label)
    return unpadded


def _coalesced(value: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the entry for each dtype's buckets, in a file that stores them coalesced: of one optimizer, or a chain."""
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if isinstance(value, dict) and value.get(COALESCED):
        of_buffers = [own for own in items if isinstance(own, dict)]
        yield from (own for buffer in of_buffers for own in buffer.values() if isinstance(own, dict))
    elif depth < MOST_DEPTH:
        for item in items:
            yield from _coalesced(item, depth + 1)


def _check_ranks(found: Checkpoint, ranks: list[_Rank]) -> None:
    """Check that every model-parallel rank has a folder, with the same contents as the others'."""
    places = [match for rank in ranks if (match := RANK.fullmatch(rank.label))]
    sizes = list(found.model_parallel)
    for own in places:
        sizes = [max(size, int(own[n + 1] or 0) + 1) for n, size in enumerate(sizes)]
    there = {(int(own[1]), int(own[2] or 0)) for own in places}
    if places and len(there) < math.prod(sizes):
        absent = next(rank for rank in itertools.product(*map(range, sizes)) if rank not in there)
        detail = f"{len(there)} of {math.prod(sizes)} model-parallel ranks are there; rank {absent} is not"
        found.add(damages.MISSING_RANK, "mp_rank_*", detail)
    first: dict[str, _Rank] = {}
    for rank in ranks:
        if any(other.keys - rank.keys or other.has_states > rank.has_states for other in ranks):
            found.add(damages.MISSING_STATE, rank.label, "it has no states, or not all that another rank's folder has")
        other = first.setdefault(rank.label.partition("_rank_")[2].partition("_")[2], rank)  # same pipeline stage
        wrong = [] if len(rank.groups) == len(other.groups) else [f"{len(rank.groups)} and {len(other.groups)} groups"]
        for number, pair in enumerate(zip(rank.groups, other.groups, strict=False)):
            wrong += [f"in group {number}: {what}" for what in settings.differences(*pair)]
        for what in wrong:
            found.add(damages.CONTRADICTION, f"{rank.label}/{MODEL}", f"unlike {other.label}, {what}")


def _check_copies(found: Checkpoint) -> None:
    """Report files with the same tensors as another rank's file of that name. Ignores tensors of zeros."""
    crcs: dict[str, list[int]] = {}
    for record in found.records:
        if record.crc != of_zeros(record.nbytes):
            crcs.setdefault(record.path, []).append(record.crc)
    first: dict[tuple[str, tuple[int, ...]], Path] = {}
    for path, own in ((Path(path), own) for path, own in crcs.items()):
        other = first.setdefault((path.name, tuple(own)), path)
        if other != path:
            stages = {match[2] for file in (path, other) if (match := RANK.fullmatch(file.parent.name))}
            is_stage = found.model_parallel[1] > 1 and len(stages) > 1
            detail = f"all of its tensors are those of {other.relative_to(found.path)}"
            kind = damages.FOREIGN_FILE if is_stage else damages.UNUSUAL
            found.add(kind, str(path.relative_to(found.path)), detail)
