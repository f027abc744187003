"""DeepSpeed's ZeRO checkpoints: a file of optimizer state for each data-parallel rank, with flat partitions.

Stage 1 and 2 flatten a parameter group and cut it in equal partitions; `param_slice_mappings` says which fragment of
which parameter begins where in a rank's partition. Stage 3 has a group for each parameter group, or several where
`sub_group_size` cuts it; each rank has ceil(elements / ranks) elements of every parameter of a group in turn.
https://deepspeed.readthedocs.io/en/latest/model-checkpointing.html
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_patches.formats import torch_file
from ckpt_patches.formats.torch_file import BadFileError, NotReadError, TensorHeader
from ckpt_patches.runtime.shown import shown

MASTER = "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam; other optimizers have others
Shape = tuple[int, ...]

# Of a state that is carried over: it becomes a file's name.
NAME = re.compile(r"[A-Za-z]\w{0,99}", re.ASCII)
RESERVED = (MASTER, "step")
NUMBERS = ("float32", "bfloat16", "float16", "float64")  # the others are no numbers by themselves
# Muon's state at stage 1 and 2: of each parameter of which a part is in the partition, all elements.
MOMENTUM = "momentum_buffer"

# Of 16-bit training with ZeRO, of older releases (fp16_), of bf16 (BF16_Optimizer).
OPTIMIZER = re.compile(r"((?:fp16_|bf16_)?zero_pp_rank_)(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
# At stage 3 one a data-parallel rank, before that one for all.
MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
EXPERT = re.compile(r"expp_rank_.*|layer_.*_expert_.*")


@dataclass(frozen=True)
class Folder:
    """The names in a checkpoint folder that matter."""

    path: Path
    names: tuple[str, ...]  # of all files, in natural order
    optimizer: dict[tuple[int, int], str]  # by data-parallel and model-parallel rank
    models: dict[tuple[int | None, int], str]  # the same; before stage 3 of no data-parallel rank

    @property
    def prefixes(self) -> set[str]:
        """What the names of the optimizer's files begin with; of several trainings, there are several."""
        return {match[1] for match in map(OPTIMIZER.fullmatch, self.optimizer.values()) if match}

    @property
    def dp_degree(self) -> int:
        return 1 + max(dp for dp, _ in self.optimizer)

    def starting_with(self, prefix: str) -> list[str]:
        return [name for name in self.names if name.startswith(prefix)]

    def zero3_models(self) -> dict[tuple[int, int], str]:
        """Stage 3: the model-states files, by data-parallel and model-parallel rank."""
        return {(dp, mp): name for (dp, mp), name in self.models.items() if dp is not None}

    @property
    def experts(self) -> list[str]:
        return [name for name in self.names if EXPERT.fullmatch(name)]


def model_name(data_parallel: int, model_parallel: int) -> str:
    """Of a rank's file of model states at stage 3."""
    return f"zero_pp_rank_{data_parallel}_mp_rank_{model_parallel:02d}_model_states.pt"


def look(path: Path) -> Folder:
    """What lies in a folder, by the names of its files."""
    names = sorted((entry.name for entry in path.iterdir() if entry.is_file()), key=_natural)
    optimizer = {(int(m[2]), int(m[3])): m[0] for m in map(OPTIMIZER.fullmatch, names) if m}
    models = {(None if m[1] is None else int(m[1]), int(m[2])): m[0] for m in map(MODEL.fullmatch, names) if m}
    return Folder(path, tuple(names), optimizer, models)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Rank 9 before rank 10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


class ElementType(NamedTuple):
    """What a tensor is besides its elements. This and the next are tuples, as there are thousands of them."""

    dtype: str  # torch's name
    requires_grad: bool = False


class Flat(NamedTuple):
    """A flattened tensor in a file."""

    file: int  # the number of the file
    offset: int  # bytes from the start of the file
    numel: int
    type: ElementType
    room: int = 0  # elements to the end of its storage, if more: DeepSpeed saves a master without padding as a view


@dataclass(frozen=True)
class Step:
    """The optimizer's step as the file has it: a number, or a tensor of no dimension."""

    value: Any
    file: int
    known: object  # to compare: the number, or the tensor's type and bytes
    group: int

    @property
    def number(self) -> float | None:
        """None if it is none."""
        if isinstance(self.known, tuple):
            return torch_file.number(*self.known)
        return self.known if isinstance(self.known, (int, float)) else None


@dataclass(frozen=True)
class Partition:
    """One rank's share of one group of parameters."""

    states: dict[str, Flat]  # the main parameter, by MASTER, and what the optimizer has of the same elements
    step: Step | None
    fragments: dict[str, tuple[int, int]]  # stage 1 and 2: by parameter, where in the partition: start, elements
    scalars: tuple[str, ...] = ()  # what else the optimizer has of the group, such as mu_product
    others: tuple[str, ...] = ()  # tensors that are neither of these elements nor single numbers
    momentum: Flat | None = None  # Muon's at stage 1 and 2, which can be of whole parameters
    in_momentum: Mapping[str, int] = field(default_factory=dict)  # by parameter, where its fragment is in there
    wholes: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # and all of it: start, elements

    def held(self) -> list[str]:
        """The states of each fragment, the main parameter's first."""
        return [*self.states, *([MOMENTUM] if self.momentum else [])]

    def place(self, name: str, key: str) -> tuple[Flat, int]:
        """The tensor with a state of a parameter, and the element at which the parameter's fragment begins there."""
        if key == MOMENTUM and self.momentum:
            return self.momentum, self.in_momentum[name]
        return self.states[key], self.fragments[name][0]


@dataclass(frozen=True)
class RankState:
    """What a rank's optimizer file holds."""

    stage: int
    partitions: tuple[Partition, ...]  # by group
    data_parallel: tuple[int, ...] = ()  # ranks that share each group, where the file tells
    paddings: tuple[int, ...] = ()  # by group, elements at the end of the last partition
    settings: tuple[dict[str, Any], ...] = ()  # of the parameter groups: rates, betas, and in some releases the step
    states: int = 0  # groups that have moments
    sharing: tuple[tuple[int, ...], ...] = ()  # stage 3: by group the ranks that share it, where the file tells


@dataclass(frozen=True)
class ModelFile:
    """What a model-states file holds that matters beside the optimizer's state."""

    file: int
    shapes: tuple[dict[str, Shape], ...]  # of the trained parameters, by group
    module: dict[str, TensorHeader] = field(default_factory=dict)  # the weights


def optimizer_of(path: Path, value: Any) -> dict[str, Any]:
    """The optimizer's state in what a rank's file holds.

    Raises:
        BadFileError: there is none.
    """
    found: dict[str, Any] = required(value, "optimizer_state_dict", path)
    return found


def stage_of(optimizer: Mapping[str, Any]) -> int:
    """BF16_Optimizer writes none. An enum is made of its number."""
    stage = optimizer.get("zero_stage", 1)
    return int(stage.args[0] if isinstance(stage, torch_file.Instance) else stage)


def read_rank(path: Path, file: int, optimizer: dict[str, Any]) -> RankState:
    """A rank's optimizer file; `file` is the number that its tensors are to have.

    Raises:
        BadFileError: something is not as DeepSpeed writes it.
        UnknownDtypeError: a tensor's elements are of a type that is not known.
    """
    stage = stage_of(optimizer)
    base = required(optimizer, "optimizer_state_dict" if stage > 2 else "base_optimizer_state", path)
    states = required(base, "state", path)
    if not isinstance(states, dict):
        raise BadFileError(f"{path}: expected 'state' as a dict, found {type(states).__name__}")
    masters = required(optimizer, "fp32_flat_groups" if stage > 2 else "single_partition_of_fp32_groups", path)
    mappings = [{}] * len(masters) if stage > 2 else required(optimizer, "param_slice_mappings", path)
    if len(mappings) < len(masters) and len(mappings) == len(required(base, "param_groups", path)):
        # DeepSpeed makes one group of all where it sets up torch's Adagrad anew.
        raise NotReadError(f"{path}: the optimizer has {len(mappings)} group, and {len(masters)} main parameters")
    if not len(states) <= len(masters) == len(mappings) or not states.keys() <= {*range(len(masters))}:
        raise BadFileError(
            f"{path}: expected as many groups in each part of it, found the state of {len(states)}, master parameters "
            f"of {len(masters)} and fragments of {len(mappings)}"
        )
    paddings = optimizer.get("group_paddings") or ()
    partitions = []
    for group, (master, mapping) in enumerate(zip(masters, mappings, strict=True)):
        padding = paddings[group] if group < len(paddings) and type(paddings[group]) is int else 0
        of_muon = stage < 3 and _is_of_muon(base, group)
        state = states.get(group) or {}
        partitions.append(_partition(path, file, group, state, master, mapping, padding, is_of_muon=of_muon))
    counts = optimizer.get("partition_count") or ()
    return RankState(
        stage,
        tuple(partitions),
        tuple(counts) if isinstance(counts, (list, tuple)) else (counts,),
        tuple(optimizer.get("group_paddings") or ()),
        tuple(base.get("param_groups") or ()),
        len(states),
        tuple(tuple(group.get("partition_ranks") or ()) for group in optimizer.get("ds_zero_partition_groups") or ()),
    )


def _is_of_muon(base: Mapping[str, Any], group: int) -> bool:
    """Whether a group is of the matrices that Muon orthogonalizes."""
    groups = base.get("param_groups") or ()
    return group < len(groups) and isinstance(groups[group], dict) and groups[group].get("use_muon") is True


def _partition(
    path: Path,
    file: int,
    group: int,
    state: dict[str, Any],
    master: Any,
    mapping: Mapping[str, Any],
    padding: int,
    *,
    is_of_muon: bool,
) -> Partition:
    states = {MASTER: _flat(path, file, MASTER, master)}
    fragments = {name: _fragment(path, name, address) for name, address in mapping.items()}
    numel = states[MASTER].numel
    sizes = range(numel, max(states[MASTER].room, numel + padding) + 1)  # the master can be without its padding
    scalars, others, momentum = [], [], None
    for key, value in state.items():
        if key in MOMENTS:
            states[key] = _flat(path, file, key, value)
        elif key == "step" or value is None:
            continue
        elif not isinstance(value, TensorHeader) or not value.shape or value.shape == (1,) != (numel,):
            scalars.append(str(key))
        elif not _is_flat(value) or not NAME.fullmatch(str(key)) or key in RESERVED:
            others.append(str(key))
        elif is_of_muon and key == MOMENTUM:
            momentum = _flat(path, file, key, value)
        elif value.numel in sizes:
            states[key] = _flat(path, file, key, value)
        else:
            others.append(str(key))
    step = _step(path, file, group, state)
    return Partition(states, step, fragments, tuple(scalars), tuple(others), momentum)


def _is_flat(tensor: TensorHeader) -> bool:
    return tensor.is_contiguous and len(tensor.shape) == 1 and tensor.dtype in NUMBERS


def _fragment(path: Path, name: str, address: Any) -> tuple[int, int]:
    """Of a fragment_address, a dataclass: the first element, the number."""
    fields = address.fields if torch_file.instance(address, "fragment_address") else {}
    start, numel = fields.get("start"), fields.get("numel")
    if type(start) is not int or type(numel) is not int or start < 0 or numel < 0:
        raise BadFileError(f"{path}: expected a fragment of {name} with a start and a length, found {shown(address)}")
    return start, numel


def _flat(path: Path, file: int, key: str, tensor: Any) -> Flat:
    if not isinstance(tensor, TensorHeader) or not tensor.is_contiguous or len(tensor.shape) != 1:
        raise BadFileError(f"{path}: expected {key} as one flattened tensor, found {shown(tensor)}")
    room = (tensor.storage.offset + tensor.storage.nbytes - tensor.offset) // tensor.item_size
    return Flat(file, tensor.offset, tensor.numel, ElementType(tensor.dtype, tensor.requires_grad), room)


def _step(path: Path, file: int, group: int, state: Mapping[str, Any]) -> Step | None:
    value = state.get("step")
    if value is None:
        return None
    if not isinstance(value, TensorHeader):
        return Step(value, file, value if isinstance(value, (int, float)) else None, group)
    return Step(value, file, (value.dtype, torch_file.data_of(path, value)), group)


def read_model(path: Path, file: int, value: Any) -> ModelFile:
    """A model-states file.

    Raises:
        BadFileError: it does not say what shapes its parameters have.
    """
    groups = required(value, "param_shapes", path)
    shapes = tuple({name: tuple(shape) for name, shape in group.items()} for group in groups)
    module = value.get("module")
    weights = {k: v for k, v in module.items() if isinstance(v, TensorHeader)} if isinstance(module, dict) else {}
    return ModelFile(file, shapes, weights)


def required(holder: Any, key: Any, path: Path) -> Any:
    """What a dict of a file has under a key.

    Raises:
        BadFileError: it is none, or has no such key.
    """
    if not isinstance(holder, dict):
        raise BadFileError(f"{path}: expected {key!r} in a dict, found {type(holder).__name__}")
    if key not in holder:
        raise BadFileError(f"{path}: expected {key!r} in it, found {sorted(map(str, holder))[:20]}")
    return holder[key]


class Shares(NamedTuple):
    """Stage 3: a parameter's elements in the partitions of a group. The last ranks have fewer, or none."""

    numel: int  # in all
    each: int  # elements that a rank has room for
    start: int  # of these, in each partition

    def of(self, rank: int) -> int:
        """Elements that a rank has."""
        return max(0, min(self.each, self.numel - rank * self.each))


def shares(shapes: Mapping[str, Shape], ranks: int) -> Iterator[tuple[str, Shares]]:
    """Stage 3: where each parameter of a group lies in the partitions of the ranks."""
    start = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        each = -(-numel // ranks)
        yield name, Shares(numel, each, start)
        start += each
