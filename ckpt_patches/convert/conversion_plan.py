"""Turn the slices of a checkpoint into a plan: which elements of which files go where in which file of the output.

Nothing is read or written. Every error that the headers show is raised here.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_patches.convert import layout, rules
from ckpt_patches.convert.layout import Layout
from ckpt_patches.convert.reading import Records
from ckpt_patches.convert.rules import Merged, Rules
from ckpt_patches.convert.source import Source, UpstreamsAloneError
from ckpt_patches.errors import UserError
from ckpt_patches.formats.checkpoint import Extent
from ckpt_patches.formats.dtypes import ITEM_SIZE
from ckpt_patches.formats.paths import is_within
from ckpt_patches.formats.torch_file import StorageHeader, TensorHeader, storages_in
from ckpt_patches.formats.universal import state_file
from ckpt_patches.formats.zero import MASTER, MOMENTUM, ElementType, Shape
from ckpt_patches.formats.zero_folder import Slice, Zero, shapes_of
from ckpt_patches.runtime.shown import shown

BY_NUMBERS = (
    "the experts are in folders by their numbers among all (deepspeed_experts.global_N), which DeepSpeed since 0.14.1 "
    "loads with the fix universal_experts, and at which it stops without"
)
OF_MUON = (
    "Muon's momentum of ZeRO 1 and 2 was converted by whole matrices, which DeepSpeed loads with the fix "
    "universal_optimizer_states, and at whose first step it fails without"
)
OF_FIRST_RANK = (
    "of {0} and others that the optimizer does not have, {1} in all, the first tensor-parallel rank's part was "
    "written, as by DeepSpeed's converter: a run that freezes them loads each rank's own from the model's files"
)
PLACED, AVERAGED, FLOAT32 = "placed", "averaged", "float32"

Extents = Callable[[], Iterable[Extent]]  # of a slice: made when the file is written, as at stage 3 each rank has one


@dataclass(frozen=True)
class Content:
    """The elements of a storage in an output file.

    `copies` are all slices that make up the parameter, as often as ranks hold it: all must be equal, or are averaged.
    """

    dtype: str  # of the slices
    layout: Layout
    copies: Sequence[Sequence[Extents]]
    how: str = PLACED  # or AVERAGED, or FLOAT32: converted to it

    @property
    def numel(self) -> int:
        return math.prod(self.layout.shape)

    @property
    def result_dtype(self) -> str:
        return "float32" if self.how == FLOAT32 else self.dtype

    @property
    def nbytes(self) -> int:
        """The size of the storage in the output."""
        return self.numel * ITEM_SIZE[self.result_dtype]


@dataclass(frozen=True)
class TorchOutput:
    """A file in torch.save's format. `contents` are the storages of the tensors in `value`, by key."""

    name: str  # below the output folder
    value: Any
    contents: dict[str, Content]

    @property
    def nbytes(self) -> int:
        return sum(content.nbytes for content in self.contents.values())


@dataclass(frozen=True)
class CopiedOutput:
    """A file of the checkpoint that is copied unchanged."""

    name: str
    path: Path
    nbytes: int


Output = TorchOutput | CopiedOutput


@dataclass(frozen=True)
class Plan:
    """A complete conversion."""

    outputs: tuple[Output, ...]
    records: Sequence[Records] = ()  # of each file that is read
    warnings: tuple[str, ...] = ()
    lost: Mapping[str, Sequence[str]] = field(default_factory=dict)  # states that are left out, with their parameters
    of_first_rank: Sequence[str] = ()  # weights of which the other tensor-parallel ranks' parts are left out
    has_frozen_parts: bool = False  # stage 3: in the model files, which are copied


def plan(source: Source, *, strict: bool = True, drop: Collection[str] = (), skip_lost: bool = False) -> Plan:
    """The plan for a checkpoint.

    `strict` refuses patterns that match no parameter. `drop` names states to leave out; with `skip_lost` those that
    cannot be converted are left out as well.

    Raises:
        UserError: dtypes or states differ between ranks, a rule does not fit, or a state cannot be converted.
    """
    files, folder = [*source.zero.ranks.values()], source.zero.folder.path
    if MASTER in drop:
        raise UserError(f"--drop-state {MASTER}: expected a state of the optimizer, found the main parameters")
    held = {key for file in files for own in file.partitions for key in (*own.held(), *own.others, *own.singles)}
    if unknown := sorted({*drop} - held):
        raise UserError(f"--drop-state {unknown[0]}: expected one of {', '.join(sorted(held - {MASTER}))}")
    lost = dict(_lost(source.zero, drop, is_error=not skip_lost))
    planner = _Planner(source, {*drop, *lost})
    outputs: list[Output] = [
        *planner.outputs(),
        _saved("zero/optimizer_state.pt", source.optimizer_state, files[0].path),
    ]
    outputs += [CopiedOutput(name, folder / name, (folder / name).stat().st_size) for name in source.copied]
    for output in outputs:
        if not is_within(output.name):  # the name of a parameter is the name of a folder
            raise UserError(f"{output.name!r} is no name of a file in the output folder")
    has_rules = not planner.is_stage_3 or source.tp_degree > 1  # else no parameter is looked up in them
    warnings = planner.rules.check_patterns(strict=strict) if has_rules else []
    if any(len(expert.ranks) > 1 for expert in source.experts.values()):
        warnings.append(BY_NUMBERS)
    if any(own.momentum for file in files for own in file.partitions) and MOMENTUM not in drop:
        warnings.append(OF_MUON)
    if planner.of_first_rank:
        warnings.append(OF_FIRST_RANK.format(shown(planner.of_first_rank[0]), len(planner.of_first_rank)))
    has_frozen_parts = any(model.value.get("frozen_param_fragments") for model in source.zero.models.values())
    return Plan(tuple(outputs), source.records, tuple(warnings), lost, planner.of_first_rank, has_frozen_parts)


def _lost(found: Zero, drop: Collection[str], *, is_error: bool) -> Iterator[tuple[str, list[str]]]:
    """The states that a universal checkpoint cannot hold, with their parameters; none for single values.

    Raises:
        UserError: there is one, and `is_error`.
    """
    every: dict[str, set[str]] = {}
    for file in found.ranks.values():
        for number, own in enumerate(file.partitions):
            for state in (state for state in (*own.others, *own.singles) if state not in drop):
                names = own.fragments or shapes_of(found.model(file.model_rank))[number]
                if is_error:
                    raise UserError(
                        f"{file.path}: the optimizer's state {shown(state)} of "
                        f"{shown(next(iter(names), 'no parameter'))} and others of its group cannot be converted: "
                        "expected a flat tensor of numbers, one for each of the main parameter's; resume on the same "
                        "ranks, or leave it out with ckpt-patches to-universal "
                        f"--drop-state {shown(state)}, and the optimizer begins anew with it"
                    )
                every.setdefault(state, set()).update(names)
    for state, of_names in every.items():
        yield state, sorted(of_names)


class _Planner:
    """Plans the files of parameters. Stage 3 has no step for each, and no weights without optimizer states."""

    def __init__(self, source: Source, drop: Collection[str]) -> None:
        self.source, self.drop = source, drop
        self.is_stage_3 = source.zero.stage > 2
        self.rules = Rules(source.info)
        self.of_first_rank: list[str] = []

    def outputs(self) -> Iterator[TorchOutput]:
        names = set()
        for name in self.source.slices:
            expert = self.source.experts.get(name)
            if expert is None:
                planned = self._parameter(name, self._by_stage(name))
            else:
                pairs = zip(expert.folders, self._of_ranks(name, expert.ranks), strict=True)
                planned = (output for folder, own in pairs for output in self._parameter(folder, [[own]]))
            for output in planned:
                names.add(output.name)
                yield output
        if not self.is_stage_3:
            yield from self._module_weights(names)

    def _by_stage(self, name: str) -> list[list[Slice]]:
        """A parameter's slices, by pipeline stage that holds elements of it and tensor-parallel rank."""
        by_rank, degree = self.source.slices[name], self.source.tp_degree
        stages = sorted({rank // degree for rank, slices in by_rank.items() if any(own.parts for own in slices)})
        if self.is_stage_3:
            stages = [0]
        elif self.rules.is_replicated_in_pipeline(name):
            stages = stages[:1]
        return [[self._all_share(name, stage * degree + tp) for tp in range(degree)] for stage in stages]

    def _all_share(self, name: str, model_rank: int) -> Slice:
        """The slice of a parameter that all data-parallel ranks share, on one model-parallel rank."""
        held = self.source.slices[name].get(model_rank, [])
        if len(held) > 1 or any(len(own.sharing) != self.source.zero.data_parallel(model_rank) for own in held):
            raise UpstreamsAloneError(f"{name} is partitioned over a part of the ranks only")
        return held[0] if held else Slice(name, model_rank, (), None)

    def _of_ranks(self, name: str, ranks: Sequence[tuple[int, ...]]) -> list[Slice]:
        """The slices of an expert's parameter, which these data-parallel ranks share, by expert-parallel rank."""
        by_sharing = {own.sharing: own for held in self.source.slices[name].values() for own in held}
        if by_sharing.keys() != {*ranks}:
            raise UserError(f"{name}: expected that the ranks {list(ranks)} share it, found {list(by_sharing)}")
        return [by_sharing[sharing] for sharing in ranks]

    def _parameter(self, name: str, by_stage: Sequence[Sequence[Slice]]) -> Iterator[TorchOutput]:
        """The files of a parameter. What several pipeline stages hold is one copy each."""
        if not by_stage:
            return
        shapes = [_shapes(slices) for slices in by_stage]
        states = [self._states(name, slices) for slices in by_stage]
        if any(own != shapes[0] for own in shapes) or any(own != states[0] for own in states):
            raise UserError(f"{name}: expected the same shapes and states in all pipeline stages, found others")
        steps = [part.partition.step for own in by_stage[0] for part in own.parts] if not self.is_stage_3 else ()
        if step := next(filter(None, steps), None):
            yield _saved(state_file(name, "step"), step.value, step.file)
        is_flat = self.is_stage_3 and len(shapes[0]) == 1  # upstream writes it without its dimensions
        merged = Merged(layout.whole((math.prod(shapes[0][0]),))) if is_flat else self.rules.of(name, shapes[0])
        if merged.is_averaged and len(by_stage) > 1:
            raise UserError(
                f"{name}: expected pipeline stages to hold the same values, found averaged ones of "
                f"{len(by_stage)} stages; no pattern of {rules.PIPELINE_REPLICATED} declares them equal"
            )
        for key, kind in states[0].items():
            copies = [copy for slices in by_stage for copy in _copies(slices, key, is_each=merged.is_each)]
            content = Content(kind.dtype, merged.layout, copies, AVERAGED if merged.is_averaged else PLACED)
            param = _tensor(kind, merged.layout.shape)
            value = param if is_flat else {**merged.entries, "param": param}
            yield TorchOutput(state_file(name, key), value, {"0": content})

    def _states(self, name: str, slices: Sequence[Slice]) -> dict[str, ElementType]:
        """The states that all slices have, and the type of their elements.

        Raises:
            UserError: a slice lacks a state that another one has, or has it in another type.
        """
        held = [own for own in slices if any(part.numel for part in own.parts)] or [own for own in slices if own.parts]
        by_slice = [own.states() for own in held] or [{MASTER: ElementType("float32")}]
        found = {}
        for key, kind in by_slice[0].items():
            kinds = [own.get(key) for own in by_slice]
            if any({*own} != {*by_slice[0]} for own in by_slice) or len({one and one.dtype for one in kinds}) > 1:
                every = [{shown(one): own[one].dtype for one in own} for own in by_slice]
                raise UserError(f"{name}: expected the same states on all model-parallel ranks, found {every}")
            if key not in self.drop:
                found[key] = ElementType(kind.dtype, any(one and one.requires_grad for one in kinds))
        return found

    def _module_weights(self, names: set[str]) -> Iterator[TorchOutput]:
        """The model's weights that the optimizer does not hold: frozen and tied parameters, buffers."""
        for model in self.source.zero.models.values():
            module, named = model.value.get("module"), model.value.get("buffer_names")
            buffers = named if isinstance(named, list) else []
            for name, weight in module.items() if isinstance(module, dict) else ():
                output = state_file(name, MASTER)
                if isinstance(weight, TensorHeader) and output not in names:
                    names.add(output)
                    self.of_first_rank += [name] if self.source.tp_degree > 1 and name not in buffers else []
                    yield _as_float32(output, self.source.zero.folder.path / model.name, weight)


def _shapes(slices: Sequence[Slice]) -> list[Shape]:
    found = [own.shape for own in slices if own.shape is not None]
    if len(found) < len(slices):
        raise UserError(f"{slices[0].name}: expected a shape for each model-parallel rank, found {found}")
    return found


def _copies(slices: Sequence[Slice], key: str, *, is_each: bool) -> Iterator[Sequence[Extents]]:
    """The slices of a state, as often as ranks hold them all."""
    for together in [[own] for own in slices] if is_each else [slices]:
        count = max(len(own.copies(key)) for own in together) if key == MOMENTUM else 1
        for number in range(count):
            yield [partial(_copy, own, key, number) for own in together]


def _copy(own: Slice, key: str, number: int) -> list[Extent]:
    copies = own.copies(key)
    return copies[min(number, len(copies) - 1)]


def _tensor(kind: ElementType, shape: Shape) -> TensorHeader:
    """A tensor that covers a complete storage of the output."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    storage = StorageHeader("0", kind.dtype, math.prod(shape), 0)
    return TensorHeader(storage, kind.dtype, 0, shape, stride, kind.requires_grad)


def _as_float32(name: str, path: Path, weight: TensorHeader) -> TorchOutput:
    """A weight of the model as a main parameter."""
    if not weight.is_contiguous:
        raise UserError(f"{name}: the model's weight is not contiguous")
    how = PLACED if weight.dtype == "float32" else FLOAT32
    extents = partial(tuple, (Extent(str(path), weight.offset, weight.nbytes),))
    content = Content(weight.dtype, layout.whole(weight.shape), [[extents]], how)
    return TorchOutput(
        name, {"param": _tensor(ElementType("float32", weight.requires_grad), weight.shape)}, {"0": content}
    )


def _saved(name: str, value: Any, path: Path | str) -> TorchOutput:
    """A value from a file of the checkpoint, with the storages in it."""
    contents = {}
    for storage in storages_in(value):
        extents = partial(tuple, (Extent(str(path), storage.offset, storage.nbytes),))
        contents[storage.key] = Content(storage.dtype, layout.whole((storage.numel,)), [[extents]])
    return TorchOutput(name, value, contents)
