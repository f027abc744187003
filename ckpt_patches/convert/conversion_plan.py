"""Turn the slices of a checkpoint into a plan: which bytes of which file go where in which file of the output.

Nothing is read or written. Every error that the headers show is raised here.
"""

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import replace

from ckpt_patches.convert import layout, rules
from ckpt_patches.convert.output_files import (
    Content,
    CopiedOutput,
    Link,
    Output,
    Plan,
    StateOf,
    TorchOutput,
    as_float32,
    saved,
    tensor,
    with_copy,
)
from ckpt_patches.convert.rules import Rules, States
from ckpt_patches.convert.source import UPSTREAM, Source
from ckpt_patches.errors import UserError
from ckpt_patches.formats.paths import is_within
from ckpt_patches.formats.torch_file import TensorHeader
from ckpt_patches.formats.universal import state_file
from ckpt_patches.formats.zero import MASTER, ElementType, Shape, Step
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


def plan(source: Source, *, strict: bool = True, drop: Collection[str] = (), drop_singles: bool = False) -> Plan:
    """The plan for a checkpoint.

    `strict` refuses patterns that match no parameter. `drop` names states to leave out; with `drop_singles` those that
    are single values are left out as well.

    Raises:
        UserError: dtypes or states differ between ranks, a rule does not fit, or a state cannot be converted.
    """
    files = [*source.zero.ranks.values()]
    if MASTER in drop:
        raise UserError(f"--drop-state {MASTER}: expected a state of the optimizer, found the main parameters")
    _check_lost(source.zero, drop, drop_singles=drop_singles)
    known = Rules(source.info)
    found = [*(_Stage3 if source.zero.stage > 2 else _Stages1And2)(source, known, drop).outputs()]
    found.append(saved("zero/optimizer_state.pt", source.optimizer_state, files[0].path))
    for output in found:
        if not is_within(output.name):  # the name of a parameter is the name of a folder
            raise UserError(f"{output.name!r} is no name of a file in the output folder")
    warnings = known.check_patterns(strict=strict)
    if any(len(expert.ranks) > 1 for expert in source.local_experts.values()):
        warnings.append(BY_NUMBERS)
    if any(own.momentum for file in files for own in file.partitions):
        warnings.append(OF_MUON)
    links = tuple(output for output in found if isinstance(output, Link))
    outputs: list[Output] = [output for output in found if not isinstance(output, Link)]
    folder = source.zero.folder.path
    outputs += [saved(name, value, folder / name) for name, value in source.rewritten]
    outputs += [CopiedOutput(name, folder / name, (folder / name).stat().st_size) for name in source.copied]
    return Plan(tuple(outputs), links, source.records, tuple(warnings))


def _check_lost(found: Zero, drop: Collection[str], *, drop_singles: bool) -> None:
    """Refuse states that a universal checkpoint cannot hold, but for those that are left out on request.

    Raises:
        UserError: one is not a flat tensor with an element for each of the main parameter's.
    """
    for file in found.ranks.values():
        for number, own in enumerate(file.partitions):
            lost = own.others if drop_singles else own.others + own.singles
            for state in (state for state in lost if state not in drop):
                names = own.fragments or shapes_of(found.model(file.model_rank))[number]
                raise UserError(
                    f"{file.path}: the optimizer's state {shown(state)} of {shown(next(iter(names), 'no parameter'))} "
                    "and others of its group cannot be converted: expected a flat tensor of numbers, one for each of "
                    "the main parameter's; resume on the same ranks, or leave it out with ckpt-patches to-universal "
                    f"--drop-state {shown(state)}, and the optimizer begins anew with it"
                )


class _Of:
    """The outputs of parameters; see `outputs` of the stages."""

    def __init__(self, source: Source, known: Rules, drop: Collection[str]) -> None:
        self.source, self.rules, self.drop = source, known, drop

    def states(self, name: str, slices: Sequence[Slice]) -> States:
        """By state that all slices have: its element type, and it on each of them.

        Raises:
            UserError: a slice lacks a state that another one has, or has it in another type.
        """
        held = [own for own in slices if any(part.numel for part in own.parts)] or [own for own in slices if own.parts]
        by_slice = [own.states() for own in held] or [{MASTER: ElementType("float32")}]
        for own in by_slice:
            if {*own} != {*by_slice[0]}:
                every = [", ".join(map(shown, one)) for one in by_slice]
                raise UserError(f"{name}: expected the same states on all model-parallel ranks, found {every}")
        found = {}
        for key in by_slice[0]:
            kinds = [own[key] for own in by_slice]
            if len({kind.dtype for kind in kinds}) > 1:
                raise UserError(f"{name}: expected one type of {shown(key)}, found {[kind.dtype for kind in kinds]}")
            kind = ElementType(kinds[0].dtype, any(kind.requires_grad for kind in kinds))
            if key not in self.drop:
                found[key] = (kind, [StateOf(own, key) for own in slices])
        return found

    def of_ranks(self, name: str, ranks: Sequence[tuple[int, ...]]) -> list[Slice]:
        """The slices of an expert's parameter, which these data-parallel ranks share, by expert-parallel rank."""
        by_rank = self.source.slices[name]
        if len(by_rank) != 1:
            raise UserError(f"{name}: expected experts in one pipeline stage, found them in {sorted(by_rank)}")
        by_sharing = {own.sharing: own for held in by_rank.values() for own in held}
        if by_sharing.keys() != {*ranks}:
            raise UserError(f"{name}: expected that the ranks {list(ranks)} share it, found {list(by_sharing)}")
        return [by_sharing[sharing] for sharing in ranks]

    def all_share(self, name: str, model_rank: int) -> Slice:
        """The slice of a parameter that all data-parallel ranks share, on one model-parallel rank."""
        held = self.source.slices[name].get(model_rank, [])
        if len(held) > 1 or any(len(own.sharing) != self.source.zero.data_parallel(model_rank) for own in held):
            raise UserError(f"{name} is partitioned over a part of the ranks only; {UPSTREAM}")
        return held[0] if held else Slice(name, model_rank, (), None)


class _Stage3(_Of):
    """Each parameter is cut into equal parts, one per rank; upstream writes it flattened, and no step."""

    def outputs(self) -> Iterator[TorchOutput]:
        for name in self.source.slices:
            if name in self.source.experts:
                experts = self.source.experts[name]
                slices = self.of_ranks(name, experts.ranks)
                yield from rules.of_experts(name, experts, _shapes(slices)).outputs(name, self.states(name, slices))
                continue
            slices = [self.all_share(name, tp) for tp in range(self.source.tp_degree)]
            if len(slices) > 1:  # slices are merged as at stages 1 and 2
                yield from self.rules.of(name, _shapes(slices)).outputs(name, self.states(name, slices))
                continue
            for key, (kind, held) in self.states(name, slices).items():
                placed = layout.flattened(_shapes(slices)[0])
                value = tensor("0", kind, placed.shape)
                yield TorchOutput(state_file(name, key), value, {"0": Content(kind.dtype, placed, tuple(held))})


class _Stages1And2(_Of):
    """Each parameter group is flattened, and cut into equal partitions, one per rank."""

    def outputs(self) -> Iterator[Output | Link]:
        self._steps: dict[Hashable, str] = {}  # by step, the first file that holds it
        names = set()
        for name in self.source.slices:
            for output in self._of(name):
                names.add(output.name)
                yield output
        yield from self._module_weights(names)

    def _of(self, name: str) -> Iterator[Output | Link]:
        if name in self.source.experts:
            experts = self.source.experts[name]
            slices = self.of_ranks(name, experts.ranks)
            yield from self._step_of(name, slices)
            yield from rules.of_experts(name, experts, _shapes(slices)).outputs(name, self.states(name, slices))
        elif name in self.source.local_experts:
            expert = self.source.local_experts[name]
            for own_name, own in zip(expert.folders, self.of_ranks(name, expert.ranks), strict=True):
                yield from self._step_of(own_name, [own])
                yield from self.rules.of(own_name, _shapes([own])).outputs(own_name, self.states(own_name, [own]))
        elif stages := sorted({rank // self.source.tp_degree for rank in self._holding(name)}):
            yield from self._parameter(name, stages)

    def _holding(self, name: str) -> Iterator[int]:
        """The model-parallel ranks that have fragments of a parameter; none if it has no elements."""
        return (rank for rank, slices in self.source.slices[name].items() if any(own.parts for own in slices))

    def _parameter(self, name: str, stages: Sequence[int]) -> Iterator[Output | Link]:
        """The outputs of a parameter. What several pipeline stages hold is compared."""
        tp_degree = self.source.tp_degree
        if self.rules.is_replicated_in_pipeline(name):
            stages = stages[:1]
        by_stage = [[self.all_share(name, stage * tp_degree + tp) for tp in range(tp_degree)] for stage in stages]
        shapes = [_shapes(slices) for slices in by_stage]
        if any(own != shapes[0] for own in shapes):
            raise UserError(f"{name}: expected the same shapes in all pipeline stages, found {shapes}")
        yield from self._step_of(name, by_stage[0])
        states = self.states(name, by_stage[0])
        pairs = zip(stages[1:], by_stage[1:], strict=True)
        copies = [((stages[0], stage), self.states(name, slices)) for stage, slices in pairs]
        for key, output in zip(states, self.rules.of(name, shapes[0]).outputs(name, states), strict=True):
            contents = {k: _with_copies(name, key, one, copies) for k, one in output.contents.items()}
            yield replace(output, contents=contents)

    def _step_of(self, name: str, slices: Sequence[Slice]) -> Iterator[Output | Link]:
        """A file with the step, or a link to the first file with the same step of the same group.

        A link is safe: DeepSpeed requires that all parameters of a group are at the same step.
        """
        step = next((part.partition.step for own in slices for part in own.parts if part.partition.step), None)
        if step:
            file = state_file(name, "step")
            first = self._steps.setdefault(_same_file(step) or file, file)
            yield saved(file, step.value, step.file) if first == file else Link(file, first)

    def _module_weights(self, names: set[str]) -> Iterator[Output]:
        """The model's weights that the optimizer does not hold: frozen and tied parameters, buffers."""
        for model in self.source.zero.models.values():
            module = model.value.get("module")
            for name, weight in module.items() if isinstance(module, dict) else ():
                output = state_file(name, MASTER)
                if isinstance(weight, TensorHeader) and output not in names:
                    names.add(output)
                    yield as_float32(output, self.source.zero.folder.path / model.name, weight)


def _shapes(slices: Sequence[Slice]) -> list[Shape]:
    for own in slices:
        if own.shape is None:
            found = [one.shape for one in slices]
            raise UserError(f"{own.name}: expected a shape for each model-parallel rank, found {found}")
    return [own.shape for own in slices if own.shape is not None]


def _with_copies(name: str, key: str, content: Content, copies: Sequence[tuple[tuple[int, int], States]]) -> Content:
    """A state's content, to be compared with the copies that other pipeline stages hold."""
    for stages, states in copies:
        kind, slices = states.get(key, (ElementType("none"), ()))
        if kind.dtype != content.dtype or content.how != "place":
            found = "averaged" if content.how != "place" else f"{content.dtype} and {kind.dtype}"
            raise UserError(
                f"{name}: expected pipeline stages {stages[0]} and {stages[1]} to hold the same {shown(key)}, found "
                f"{found}; no pattern of {rules.PIPELINE_REPLICATED} declares it equal"
            )
        content = with_copy(content, slices, stages)
    return content


def _same_file(step: Step) -> Hashable:
    """A key that is equal for steps that are written as the same file; None if that is unknown."""
    value = step.value
    if type(value) in (int, float):
        return step.group, type(value), value
    if isinstance(value, TensorHeader) and value.numel == value.storage.numel and not value.wrapping:
        return step.group, step.known, value.shape, value.stride, value.requires_grad, value.storage.dtype
    return None
