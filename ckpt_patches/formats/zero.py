"""DeepSpeed's ZeRO checkpoints: an optimizer file per data-parallel rank, with flat partitions.

Stages 1 and 2 flatten a param group and split it into equal partitions. `param_slice_mappings` has the position of each
parameter's fragment in a rank's partition. Stage 3 has one group per param group, or several if `sub_group_size` splits
it. Each rank has ceil(elements / ranks) elements of each parameter of a group, one parameter after another.
https://deepspeed.readthedocs.io/en/latest/model-checkpointing.html
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from ckpt_patches.formats import torch_file, zero_keys
from ckpt_patches.formats.settings import is_step
from ckpt_patches.formats.torch_file import BadFileError, NotReadError, TensorHeader, TorchFile
from ckpt_patches.runtime.shown import shown

MASTER = "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's; other optimizers have others
Shape = tuple[int, ...]

# Names of states that are converted: they become file names.
NAME = re.compile(r"[A-Za-z]\w{0,99}", re.ASCII)
RESERVED = (MASTER, "step")
NUMBERS = ("float32", "bfloat16", "float16", "float64")  # elements of other dtypes are not numbers by themselves
# Muon's state at stages 1 and 2: all elements of each parameter with a fragment in the partition.
MOMENTUM = "momentum_buffer"

# Prefixes: none for 16-bit training with ZeRO, fp16_ in older releases, bf16_ for BF16_Optimizer.
OPTIMIZER = re.compile(r"((?:fp16_|bf16_)?zero_pp_rank_)(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
# Stage 3 has one per data-parallel rank, earlier stages one for all.
MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
EXPERT = re.compile(r"expp_rank_.*|layer_.*_expert_.*")
OPTIMIZER_STATE = "optimizer_state_dict"  # the key of all that an optimizer file has for its rank


@dataclass(frozen=True)
class Folder:
    """The relevant file names in a checkpoint folder."""

    path: Path
    names: tuple[str, ...]  # of all files, in natural order
    optimizer: dict[tuple[int, int], str]  # by data-parallel and model-parallel rank
    models: dict[tuple[int | None, int], str]  # the same; before stage 3 the data-parallel rank is None

    @property
    def prefixes(self) -> set[str]:
        """The prefixes of the optimizer files' names; several if the folder has files of several runs."""
        return {match[1] for match in map(OPTIMIZER.fullmatch, self.optimizer.values()) if match}

    def starting_with(self, prefix: str) -> list[str]:
        return [name for name in self.names if name.startswith(prefix)]

    def zero3_models(self) -> dict[tuple[int, int], str]:
        """Stage 3: the model-states files, by data-parallel and model-parallel rank."""
        return {(dp, mp): name for (dp, mp), name in self.models.items() if dp is not None}

    @property
    def experts(self) -> list[str]:
        return [name for name in self.names if EXPERT.fullmatch(name)]


def model_name(data_parallel: int, model_parallel: int) -> str:
    """The name of a rank's model-states file at stage 3."""
    return f"zero_pp_rank_{data_parallel}_mp_rank_{model_parallel:02d}_model_states.pt"


def look(path: Path) -> Folder:
    """Index the file names of a folder by kind and rank."""
    listed = (entry.name for entry in path.iterdir() if not entry.name.startswith("."))  # as macOS leaves beside files
    names = sorted((name for name in listed if (path / name).is_file()), key=_natural)
    optimizer = {(int(m[2]), int(m[3])): m[0] for m in map(OPTIMIZER.fullmatch, names) if m}
    models = {(None if m[1] is None else int(m[1]), int(m[2])): m[0] for m in map(MODEL.fullmatch, names) if m}
    return Folder(path, tuple(names), optimizer, models)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key: rank 9 before rank 10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


class ElementType(NamedTuple):
    """A tensor's properties besides its elements. This and `Flat` are tuples because there are thousands."""

    dtype: str  # torch's name
    requires_grad: bool = False


class Flat(NamedTuple):
    """A flattened tensor in a file."""

    file: str  # its path
    offset: int  # bytes from the start of the file
    numel: int
    type: ElementType
    room: int = 0  # elements up to the storage's end: a main parameter can be a view without padding


@dataclass(frozen=True)
class Step:
    """The optimizer's step as the file has it: a number, or a tensor without dimensions."""

    value: Any
    file: str
    known: object  # to compare: the number, or the tensor's dtype and bytes
    group: int

    @property
    def number(self) -> float | None:
        """The step as a number; None if it is not one."""
        if isinstance(self.known, tuple):
            return torch_file.number(*self.known)
        return self.known if isinstance(self.known, (int, float)) else None


@dataclass(frozen=True)
class Partition:
    """One rank's partition of one param group."""

    states: dict[str, Flat]  # the main parameter (MASTER), and the optimizer's states of the same elements
    step: Step | None
    fragments: dict[str, tuple[int, int]]  # stages 1 and 2: by parameter, start in the partition, elements
    others: tuple[str, ...] = ()  # what has no number for each of the main parameter's: codes, nested states
    singles: tuple[str, ...] = ()  # the group's single values, such as mu_product
    momentum: Flat | None = None  # Muon's at stages 1 and 2; it can be of full parameters
    wholes: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # by parameter, its place in `momentum`
    sizes: Mapping[str, int | None] = field(default_factory=dict)  # elements of all states; None if they are not flat
    needed: int = 0  # elements up to the end of the last fragment, which is in the partition
    master_crc: int | None = None  # CRC-32 of the main parameter; None if all of it is zero
    moment_crcs: tuple[int, ...] = ()  # the same of each moment that is not all zeros

    @property
    def numel(self) -> int:
        """Its elements. The main parameter can lack its padding."""
        return max(flat.numel for flat in self.states.values())

    @cached_property
    def stated_step(self) -> Any:
        """The step as a number, or what the file has instead; None if absent."""
        number = self.step.number if self.step else None
        return shown(self.step.value) if self.step and number is None else number

    def held(self) -> list[str]:
        """The states of each fragment, the main parameter first."""
        return [*self.states, *([MOMENTUM] if self.momentum else [])]


@dataclass(frozen=True)
class RankFile:
    """A rank's optimizer file."""

    path: Path
    rank: int  # data-parallel
    model_rank: int
    stage: int
    partitions: tuple[Partition, ...]  # by group
    data_parallel: tuple[int, ...] = ()  # number of ranks that share each group, if stored
    paddings: tuple[int, ...] = ()  # by group, elements at the end of the last partition
    settings: tuple[dict[str, Any], ...] = ()  # of the param groups: learning rate, betas, sometimes the step
    states: int = 0  # number of groups that have states
    sharing: tuple[tuple[int, ...], ...] = ()  # stage 3: by group, the ranks that share it, if stored
    loss_scale: Any = None
    root: str = ""  # the stem of the name that it was written to, or "archive"
    keys: Mapping[str, Any] = field(default_factory=dict)  # all paths in the file, as `zero_keys.keys_of` has them

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def step(self) -> float | None:
        """The highest step that the file states; None if it states none."""
        steps = [own.stated_step for own in self.partitions] + [group.get("step") for group in self.settings]
        return max(filter(is_step, steps), default=None)


def stage_of(optimizer: Mapping[str, Any]) -> int:
    """The ZeRO stage; BF16_Optimizer writes no stage. A stored enum has the number as its argument."""
    stage = optimizer.get("zero_stage", 1)
    return int(stage.args[0] if isinstance(stage, torch_file.Instance) else stage)


def _is_numbered_twice(groups: Any) -> bool:
    """Whether a param group names a parameter twice; its states then have other numbers."""
    lists = [group.get("params") for group in groups or () if isinstance(group, Mapping)]
    return any(len({*own}) < len(own) for own in lists if isinstance(own, list) and all(type(n) is int for n in own))


def read_rank(file: TorchFile) -> RankFile:
    """Parse a rank's optimizer file.

    Raises:
        BadFileError: the content is not what DeepSpeed writes.
        NotReadError: the optimizer has fewer groups than main parameters, or has one twice.
        UnknownDtypeError: a tensor's dtype is not known.
    """
    path, match = file.path, OPTIMIZER.fullmatch(file.path.name)
    assert match  # `look` has found it by this name
    optimizer = required(file.value, OPTIMIZER_STATE, path)
    stage = stage_of(optimizer)
    base = required(optimizer, "optimizer_state_dict" if stage > 2 else "base_optimizer_state", path)
    states = required(base, "state", path)
    if not isinstance(states, dict):
        raise BadFileError(f"{path}: expected 'state' as a dict, found {type(states).__name__}")
    masters = required(optimizer, "fp32_flat_groups" if stage > 2 else "single_partition_of_fp32_groups", path)
    mappings = [{}] * len(masters) if stage > 2 else required(optimizer, "param_slice_mappings", path)
    if len(mappings) < len(masters) and len(mappings) == len(required(base, "param_groups", path)):
        # DeepSpeed merges all groups into one if it creates torch's Adagrad again.
        raise NotReadError(f"{path}: the optimizer has {len(mappings)} group, and {len(masters)} main parameters")
    if _is_numbered_twice(base.get("param_groups")):  # a save at stage 3 before its first step appends them once more
        raise NotReadError(f"{path}: the optimizer has a main parameter twice, and numbers its states otherwise")
    if not len(states) <= len(masters) == len(mappings) or not states.keys() <= {*range(len(masters))}:
        raise BadFileError(
            f"{path}: expected as many groups in each part of it, found the state of {len(states)}, master parameters "
            f"of {len(masters)} and fragments of {len(mappings)}"
        )
    paddings = optimizer.get("group_paddings") or ()
    partitions, crcs = [], file.checksums
    for group, (master, mapping) in enumerate(zip(masters, mappings, strict=True)):
        padding = paddings[group] if group < len(paddings) and type(paddings[group]) is int else 0
        of_muon = stage < 3 and _is_of_muon(base, group)
        state = states.get(group) or {}
        own = _partition(path, group, state, master, mapping, padding, is_of_muon=of_muon)
        partitions.append(_with_facts(own, state, crcs, has_fragments=stage < 3))
    counts = optimizer.get("partition_count") or ()
    scale = optimizer.get("loss_scaler", optimizer.get("cur_scale"))
    return RankFile(
        path,
        int(match[2]),
        int(match[3]),
        stage,
        tuple(partitions),
        tuple(counts) if isinstance(counts, (list, tuple)) else (counts,),
        tuple(optimizer.get("group_paddings") or ()),
        tuple(group for group in base.get("param_groups") or () if isinstance(group, dict)),
        len(states),
        tuple(tuple(group.get("partition_ranks") or ()) for group in optimizer.get("ds_zero_partition_groups") or ()),
        scale.fields.get("cur_scale") if isinstance(scale, torch_file.Instance) else scale,
        file.root,
        zero_keys.keys_of(file.value),
    )


def _with_facts(own: Partition, state: Mapping[str, Any], crcs: Mapping[int, int], *, has_fragments: bool) -> Partition:
    """Add what is compared with other ranks: sizes and checksums. `crcs` are by offset."""
    tensors = {str(key): value for key, value in state.items() if value is not None}
    sizes = {key: one.numel if _has_one_dimension(one) else None for key, one in tensors.items()}
    master = own.states[MASTER]
    ends = [start + numel for start, numel in own.fragments.values() if numel]
    # AMSGrad's maxima equal exp_avg_sq as long as it grows.
    moments = [flat.offset for key, flat in own.states.items() if key != MASTER and not key.startswith("max_")]
    return replace(
        own,
        sizes={MASTER: max(master.numel, master.room), **sizes},
        needed=min(max(ends, default=0), own.numel) if has_fragments else own.numel,
        master_crc=crcs.get(master.offset),
        moment_crcs=tuple(crcs[at] for at in moments if at in crcs),
    )


def _has_one_dimension(value: Any) -> TypeGuard[TensorHeader]:
    return isinstance(value, TensorHeader) and len(value.shape) == 1


def _is_of_muon(base: Mapping[str, Any], group: int) -> bool:
    """Whether a group has the matrices that Muon orthogonalizes."""
    groups = base.get("param_groups") or ()
    return group < len(groups) and isinstance(groups[group], dict) and groups[group].get("use_muon") is True


def _partition(
    path: Path,
    group: int,
    state: dict[str, Any],
    master: Any,
    mapping: Mapping[str, Any],
    padding: int,
    *,
    is_of_muon: bool,
) -> Partition:
    states = {MASTER: _flat(path, MASTER, master)}
    fragments = {name: _fragment(path, name, address) for name, address in mapping.items()}
    numel = states[MASTER].numel
    sizes = range(numel, max(states[MASTER].room, numel + padding) + 1)  # the main parameter can lack its padding
    others, singles, momentum = [], [], None
    for key, value in state.items():
        if key in MOMENTS:
            states[key] = _flat(path, key, value)
        elif key == "step" or value is None:
            continue
        elif _is_single(value, numel):
            singles.append(str(key))
        elif not _is_flat(value) or not NAME.fullmatch(str(key)) or key in RESERVED:
            others.append(str(key))
        elif is_of_muon and key == MOMENTUM:
            momentum = _flat(path, key, value)
        elif value.numel in sizes:
            states[key] = _flat(path, key, value)
        else:
            others.append(str(key))
    step = _step(path, group, state)
    return Partition(states, step, fragments, tuple(others), tuple(singles), momentum)


def _is_single(value: Any, numel: int) -> bool:
    """Whether a state is a number, or a tensor of one element in a group of `numel`."""
    if isinstance(value, TensorHeader):
        return not value.shape or value.shape == (1,) != (numel,)
    return isinstance(value, (int, float))


def _is_flat(value: Any) -> TypeGuard[TensorHeader]:
    return _has_one_dimension(value) and value.is_contiguous and value.dtype in NUMBERS


def _fragment(path: Path, name: str, address: Any) -> tuple[int, int]:
    """The first element and number of elements in a `fragment_address`, a dataclass."""
    fields = address.fields if torch_file.instance(address, "fragment_address") else {}
    start, numel = fields.get("start"), fields.get("numel")
    if not isinstance(name, str) or type(start) is not int or type(numel) is not int or start < 0 or numel < 0:
        raise BadFileError(
            f"{path}: expected a fragment of {shown(name)} with a start and a length, found {shown(address)}"
        )
    return start, numel


def _flat(path: Path, key: str, tensor: Any) -> Flat:
    if not _has_one_dimension(tensor) or not tensor.is_contiguous:
        raise BadFileError(f"{path}: expected {key} as one flattened tensor, found {shown(tensor)}")
    room = (tensor.storage.offset + tensor.storage.nbytes - tensor.offset) // tensor.item_size
    return Flat(str(path), tensor.offset, tensor.numel, ElementType(tensor.dtype, tensor.requires_grad), room)


def _step(path: Path, group: int, state: Mapping[str, Any]) -> Step | None:
    value = state.get("step")
    if value is None:
        return None
    if not isinstance(value, TensorHeader):
        return Step(value, str(path), value if isinstance(value, (int, float)) else None, group)
    return Step(value, str(path), (value.dtype, torch_file.data_of(path, value)), group)


def required(holder: Any, key: Any, path: Path) -> Any:
    """The value of a key in a file's dict.

    Raises:
        BadFileError: `holder` is not a dict, or lacks the key.
    """
    if not isinstance(holder, dict):
        raise BadFileError(f"{path}: expected {key!r} in a dict, found {type(holder).__name__}")
    if key not in holder:
        raise BadFileError(f"{path}: expected {key!r} in it, found {sorted(map(str, holder))[:20]}")
    return holder[key]


class Shares(NamedTuple):
    """Stage 3: a parameter's elements in the partitions of a group. The last ranks have fewer, or none."""

    numel: int  # of the parameter
    each: int  # elements reserved on each rank
    start: int  # of the reserved elements in each partition

    def of(self, rank: int) -> int:
        """The number of elements on a rank."""
        return max(0, min(self.each, self.numel - rank * self.each))


def shares(shapes: Mapping[str, Shape], ranks: int) -> Iterator[tuple[str, Shares]]:
    """Stage 3: the position of each parameter of a group in the ranks' partitions."""
    start = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        each = -(-numel // ranks)
        yield name, Shares(numel, each, start)
        start += each
