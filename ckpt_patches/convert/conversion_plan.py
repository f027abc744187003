"""Turn the headers of a checkpoint into a plan: which bytes of which file go where in which file of the output.

Pure: nothing is read or written. Every error that the headers show is raised here.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_patches.convert import layout, rules
from ckpt_patches.convert.fragments import Fragment, check_fragments, fragments_of, one_kind, pieces, states_of
from ckpt_patches.convert.merge import Merge, expert_outputs
from ckpt_patches.convert.output_files import (
    Content,
    CopiedOutput,
    EqualPieces,
    Link,
    Output,
    Pieces,
    Plan,
    Slice,
    TorchOutput,
    as_float32,
    bare,
    saved,
    with_copy,
)
from ckpt_patches.convert.traits import Traits
from ckpt_patches.errors import UserError
from ckpt_patches.formats.dtypes import ITEM_SIZE
from ckpt_patches.formats.paths import is_within
from ckpt_patches.formats.torch_file import TensorHeader
from ckpt_patches.formats.universal import state_file
from ckpt_patches.formats.zero import ElementType, Partition, Shape, Shares, Step, shares
from ckpt_patches.formats.zero_checkpoint import Checkpoint, Rank
from ckpt_patches.formats.zero_experts import KEY, Experts, LocalExpert
from ckpt_patches.runtime.shown import shown

BY_NUMBERS = (
    "the experts are in folders by their numbers among all (deepspeed_experts.global_N), which DeepSpeed since 0.14.1 "
    "loads with the fix universal_experts, and at which it stops without"
)
OF_MUON = (
    "Muon's momentum of ZeRO 1 and 2 was converted by whole matrices, which DeepSpeed loads with the fix "
    "universal_optimizer_states, and at whose first step it fails without"
)
MOST_NAMED = 5
States = Mapping[str, tuple[ElementType, Sequence[Slice]]]  # by state: its element type and its slices
Parted = tuple[int, ElementType, Slice]  # a state at stage 3: number of elements, their type, their location


def plan(checkpoint: Checkpoint, traits: Traits, *, strict: bool = True) -> Plan:
    """The plan for a checkpoint. `strict` refuses suspicious checkpoints that upstream's converter would convert.

    Raises:
        UserError: fragments overlap or leave a hole, dtypes or states differ between ranks, a rule does not fit, or
            the installed DeepSpeed could not load the result.
    """
    _check_loadable(checkpoint, traits)
    found, warnings = (_Stage3 if checkpoint.stage > 2 else _Stage1And2)(checkpoint, traits, strict).outputs()
    found.append(_common_state(checkpoint))
    if any(len(expert.ranks) > 1 for expert in checkpoint.local_experts.values()):
        warnings = [*warnings, BY_NUMBERS]
    warnings = [*warnings, *_left_out(checkpoint, strict=strict)]
    if any(own.momentum for rank in checkpoint.ranks for own in rank.partitions):
        warnings = [*warnings, OF_MUON]
    for output in found:
        _check_name(output.name)
    links = tuple(output for output in found if isinstance(output, Link))
    outputs = [output for output in found if not isinstance(output, Link)]
    outputs += [saved(checkpoint.files[index].path.name, value, index) for index, value in checkpoint.rewritten]
    for index in checkpoint.copied:
        file = checkpoint.files[index]
        outputs.append(CopiedOutput(file.path.name, index, file.size))
    return Plan(checkpoint.files, tuple(outputs), links, tuple(warnings))


def _left_out(checkpoint: Checkpoint, *, strict: bool) -> Iterator[str]:
    """Warnings about optimizer states that a universal checkpoint cannot hold.

    Raises:
        UserError: with `strict`, one is a tensor.
    """
    others = {name: rank.file for rank in checkpoint.ranks for own in rank.partitions for name in own.others}
    named = ", ".join(map(shown, sorted(others)[:MOST_NAMED]))
    if others and strict:
        path = checkpoint.files[next(iter(others.values()))].path
        raise UserError(
            f"{path}: the optimizer's states {named} cannot be converted: expected flat tensors of numbers, each of "
            "all elements of the main parameters; resume on the same ranks, or leave them out with --no-strict"
        )
    if others:
        yield f"not converted: {named}; the optimizer begins anew with them"
    if scalars := sorted({name for rank in checkpoint.ranks for own in rank.partitions for name in own.scalars}):
        named = ", ".join(map(shown, scalars[:MOST_NAMED]))
        yield f"not converted: {named}; of the optimizer's states that are no tensors only step is"


def _check_loadable(checkpoint: Checkpoint, traits: Traits) -> None:
    for has, known, what in (
        (
            checkpoint.stage > 2 and checkpoint.tp_degree > 1,
            traits.zero3_tensor_parallel,
            f"is of {checkpoint.tp_degree} tensor-parallel ranks at ZeRO stage 3",
        ),
        (checkpoint.experts, traits.autoep, f"has layers of experts ({KEY})"),
    ):
        if has and not known:
            raise UserError(
                f"{checkpoint.folder} {what}, which the installed DeepSpeed does not load from a universal checkpoint: "
                "install a later release, and convert it there"
            )


class _Stage3:
    """Each parameter is cut into equal parts, one per rank; upstream writes it flattened, and no step."""

    def __init__(self, checkpoint: Checkpoint, traits: Traits, strict: bool) -> None:
        self.checkpoint, self.traits, self.strict = checkpoint, traits, strict

    def outputs(self) -> tuple[list[Output | Link], list[str]]:
        groups = [self._groups(tp) for tp in range(self.checkpoint.tp_degree)]
        names = list(groups[0])
        if self.checkpoint.tp_degree == 1:
            outputs: list[Output | Link] = list(self._experts())
            for name in names:
                for key, (numel, kind, slice_) in groups[0][name].items():
                    outputs.append(bare(state_file(name, key), kind, layout.whole((numel,)), slice_))
            return outputs, []
        return self._merged(names, groups)

    def _experts(self) -> Iterator[Output]:
        """Outputs of parameters of AutoEP's experts: those of an expert-parallel rank are cut into equal parts."""
        known = self.checkpoint.experts
        by_ep = []
        for ep, model in enumerate(self.checkpoint.expert_models):
            own = {dp for experts in known.values() for dp in experts.ranks[ep]}
            groups = [shapes if known.keys() & shapes.keys() else {} for shapes in model.shapes]
            found = self._parts(groups, [rank for rank in self.checkpoint.ranks if rank.dp in own])
            shapes = {name: shape for group in groups for name, shape in group.items()}
            by_ep.append((found, shapes))
        for name, experts in known.items():
            held = [(found[name], shapes[name]) if name in found else (None, None) for found, shapes in by_ep]
            like = next((shape for _, shape in held if shape), None)
            if like is None:
                raise UserError(f"{name}: expected its shape, as a parameter of experts, found none")
            shapes_of = [shape or (0, *like[1:]) for _, shape in held]
            parts = [part for part, _ in held if part]
            states = {}
            for key in _common_keys(name, parts):
                kind = _common_kind(name, [part[key][1] for part in parts])
                states[key] = (kind, [part[key][2] if part else Pieces.of([]) for part, _ in held])
            yield from expert_outputs(name, experts, shapes_of, states)

    def _groups(self, tp: int) -> dict[str, dict[str, Parted]]:
        """The states of each parameter that does not belong to experts."""
        known = self.checkpoint.experts
        groups = [{} if known.keys() & shapes.keys() else shapes for shapes in self.checkpoint.models[tp].shapes]
        return self._parts(groups, [rank for rank in self.checkpoint.ranks if rank.tp == tp])

    def _parts(self, groups: Sequence[Mapping[str, Shape]], ranks: Sequence[Rank]) -> dict[str, dict[str, Parted]]:
        """The states of each parameter of these groups, which these ranks share; empty groups are skipped."""
        found: dict[str, dict[str, Parted]] = {}
        for group, shapes in enumerate(groups):
            if not shapes:
                continue
            partitions = [_group_of(self.checkpoint, rank.file, rank.partitions, group) for rank in ranks]
            keys = states_of(self.checkpoint, f"parameter group {group}", partitions)
            bases = {key: self._bases(partitions, key) for key in keys}
            end = 0
            for name, share in shares(shapes, len(ranks)):
                found[name] = _equal_pieces(share, bases)
                end = share.start + share.each
            self._check_size(partitions, end, group)
        return found

    def _bases(self, partitions: Sequence[Partition], key: str) -> tuple[ElementType, tuple[tuple[int, int], ...]]:
        flats = [partition.states[key] for partition in partitions]
        return one_kind(self.checkpoint, flats), tuple((flat.file, flat.offset) for flat in flats)

    def _check_size(self, partitions: Sequence[Partition], numel: int, group: int) -> None:
        for partition in partitions:
            for key, flat in partition.states.items():
                if flat.numel < numel:
                    path = self.checkpoint.files[flat.file].path
                    raise UserError(
                        f"{path}: expected {numel} elements of {key} of group {group}, "
                        f"the shares of its parameters, found {flat.numel}"
                    )

    def _merged(self, names: Sequence[str], groups: Sequence[dict[str, Any]]) -> tuple[list[Output | Link], list[str]]:
        """Outputs with tensor parallelism: slices are merged as at stage 1 and 2."""
        merge = Merge(self.checkpoint, self.traits, self.strict)
        outputs: list[Output | Link] = []
        shapes = _shapes(self.checkpoint, self.traits)
        for name in names:
            by_tp = [groups[tp][name] for tp in range(self.checkpoint.tp_degree)]
            slices = {key: [own[key] for own in by_tp] for key in _common_keys(name, by_tp)}
            outputs += merge.outputs(
                name, shapes[name], {key: (s[0][1], [part for *_, part in s]) for key, s in slices.items()}
            )
        return outputs, merge.check_patterns()


class _Stage1And2:
    """Each parameter group is flattened, and cut into equal partitions, one per rank."""

    def __init__(self, checkpoint: Checkpoint, traits: Traits, strict: bool) -> None:
        self.checkpoint, self.traits, self.strict = checkpoint, traits, strict
        self.merge = Merge(checkpoint, traits, strict)
        self.fragments = fragments_of(checkpoint, self.merge.rules)
        self._steps: dict[Hashable, str] = {}  # by step, the first file that holds it

    def outputs(self) -> tuple[list[Output | Link], list[str]]:
        outputs: list[Output | Link] = []
        for name, shapes in _shapes(self.checkpoint, self.traits).items():
            if name in self.checkpoint.experts:
                outputs += self._experts(name, shapes[0], self.checkpoint.experts[name])
                continue
            if name in self.checkpoint.local_experts:
                outputs += self._local_experts(name, shapes[0], self.checkpoint.local_experts[name])
                continue
            by_stage = self._by_stage(name)
            if by_stage or not self.traits.module_weights:
                outputs += self._parameter(name, shapes, by_stage)
        if self.traits.module_weights:
            outputs += self._module_weights({output.name for output in outputs})
        return outputs, self.merge.check_patterns()

    def _by_stage(self, name: str) -> list[tuple[int, list[Sequence[Fragment]]]]:
        """By pipeline stage that has a parameter, in order: the parameter's fragments by tensor-parallel rank."""
        held = [self.fragments.get((name, tp), {}) for tp in range(self.checkpoint.tp_degree)]
        return [(pp, [own.get(pp, ()) for own in held]) for pp in sorted({pp for own in held for pp in own})]

    def _of_experts(self, name: str) -> Sequence[Fragment]:
        """The fragments of a parameter of experts, in its one pipeline stage and on its one tensor-parallel rank."""
        by_stage = self._by_stage(name)
        if len(by_stage) > 1:
            raise UserError(
                f"{name}: expected experts in one pipeline stage, found them in {[pp for pp, _ in by_stage]}"
            )
        return by_stage[0][1][0] if by_stage else ()

    def _parameter(
        self, name: str, shapes: Sequence[Shape], by_stage: Sequence[tuple[int, Sequence[Sequence[Fragment]]]]
    ) -> Iterator[Output | Link]:
        (first, by_tp), *others = by_stage or [(0, [()] * self.checkpoint.tp_degree)]
        for stage, held in ((first, by_tp), *others):
            for tp, fragments in enumerate(held):
                where = f"{name}, tensor-parallel rank {tp}" if self.checkpoint.tp_degree > 1 else name
                where += f", pipeline stage {stage}" if others else ""
                check_fragments(self.checkpoint, where, shapes[tp], fragments, self.strict)
        yield from self._steps_of(name, by_tp)
        states = self._states(name, by_tp)
        copies = [((first, stage), self._states(name, held)) for stage, held in others]
        for key, output in zip(states, self.merge.outputs(name, shapes, states), strict=True):
            yield replace(
                output, contents={k: _with_copies(name, key, one, copies) for k, one in output.contents.items()}
            )

    def _experts(self, name: str, shape: Shape, experts: Experts) -> Iterator[Output | Link]:
        """Outputs of a parameter of AutoEP's experts. `shape` is that of the first expert-parallel rank."""
        fragments = self._of_experts(name)
        by_ep = [[fragment for fragment in fragments if fragment.dp in ranks] for ranks in experts.ranks]
        shapes = [shape, *((len(held), *shape[1:]) for held in experts.held[1:])]
        for ep, (own, ranks) in enumerate(zip(by_ep, experts.ranks, strict=True)):
            check_fragments(self.checkpoint, f"{name}, expert-parallel rank {ep}", shapes[ep], own, self.strict, ranks)
        yield from self._steps_of(name, by_ep)
        yield from expert_outputs(name, experts, shapes, self._states(name, by_ep))

    def _local_experts(self, name: str, shape: Shape, expert: LocalExpert) -> Iterator[Output | Link]:
        """Outputs of a parameter that is a different expert's on each expert-parallel rank: one folder per expert."""
        fragments = self._of_experts(name)
        for own_name, ranks in zip(expert.folders, expert.ranks, strict=True):
            own = [fragment for fragment in fragments if fragment.dp in ranks]
            check_fragments(self.checkpoint, own_name, shape, own, self.strict, ranks)
            yield from self._steps_of(own_name, [own])
            yield from self.merge.outputs(own_name, [shape], self._states(own_name, [own]))

    def _steps_of(self, name: str, by_slice: Sequence[Sequence[Fragment]]) -> Iterator[Output | Link]:
        step = next((f.partition.step for fragments in by_slice for f in fragments if f.partition.step), None)
        if step:
            yield self._step_file(state_file(name, "step"), step)

    def _states(
        self, name: str, by_slice: Sequence[Sequence[Fragment]]
    ) -> dict[str, tuple[ElementType, Sequence[Slice]]]:
        """By state: its element type and its slices."""
        states: dict[str, tuple[ElementType, Sequence[Slice]]] = {}
        every = [fragment for fragments in by_slice for fragment in fragments]
        held = [fragment for fragment in every if fragment.numel]
        for key in states_of(self.checkpoint, name, [fragment.partition for fragment in held]):
            flats = [fragment.place(key)[0] for fragment in held or every]
            kind = one_kind(self.checkpoint, flats) if flats else ElementType("float32")
            states[key] = (kind, [pieces(fragments, key, kind) for fragments in by_slice])
        return states

    def _step_file(self, name: str, step: Step) -> Output | Link:
        """A file with a step, or a link to the first file with the same step of the same group.

        A link is safe: DeepSpeed requires that all parameters of a group are at the same step.
        """
        first = self._steps.setdefault(_same_file(step) or name, name)
        return saved(name, step.value, step.file) if first == name else Link(name, first)

    def _module_weights(self, names: set[str]) -> Iterator[Output]:
        """The model's weights that the optimizer does not hold: frozen and tied parameters, buffers."""
        for model in self.checkpoint.models:
            for name, tensor in model.module.items():
                output = state_file(name, "fp32")
                if output not in names:
                    names.add(output)
                    yield as_float32(output, model, tensor)


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


def _check_name(name: str) -> None:
    """Refuse a name outside of the output folder: the name of a parameter is the name of a folder."""
    if not is_within(name):
        raise UserError(f"{name!r} is no name of a file in the output folder")


def _common_kind(name: str, kinds: Sequence[ElementType]) -> ElementType:
    """The element type of merged slices. As with torch.cat, the result requires a gradient if one of them does."""
    if len({kind.dtype for kind in kinds}) != 1:
        raise UserError(
            f"{name}: expected one type on all expert-parallel ranks, found {[kind.dtype for kind in kinds]}"
        )
    return ElementType(kinds[0].dtype, any(kind.requires_grad for kind in kinds))


def _common_keys(name: str, parts: Sequence[Mapping[str, Parted]]) -> list[str]:
    """The states that all slices of a parameter have."""
    if any(part.keys() != parts[0].keys() for part in parts):
        found = [", ".join(map(shown, part)) for part in parts]
        raise UserError(f"{name}: expected the same states on all model-parallel ranks, found {found}")
    return list(parts[0])


def _equal_pieces(
    share: Shares, bases: Mapping[str, tuple[ElementType, tuple[tuple[int, int], ...]]]
) -> dict[str, Parted]:
    found: dict[str, Parted] = {}
    for key, (kind, where) in bases.items():
        size = ITEM_SIZE[kind.dtype]
        found[key] = (share.numel, kind, EqualPieces(where, share.start * size, share.each * size))
    return found


def _group_of(checkpoint: Checkpoint, file: int, partitions: Sequence[Partition], group: int) -> Partition:
    if group >= len(partitions):
        path = checkpoint.files[file].path
        raise UserError(f"{path}: expected the state of parameter group {group}, found {len(partitions)} groups")
    return partitions[group]


def _shapes(checkpoint: Checkpoint, traits: Traits) -> dict[str, list[Shape]]:
    """The shapes of each parameter, by tensor-parallel rank."""
    found: dict[str, dict[int, Shape]] = {}
    for index, model in enumerate(checkpoint.models):
        for group in model.shapes:
            for name, shape in group.items():
                tp = index % checkpoint.tp_degree
                if found.setdefault(name, {}).setdefault(tp, shape) != shape:
                    raise UserError(f"{name} has the shapes {found[name][tp]} and {shape} in two pipeline stages")
    for name, shapes in found.items():
        if len(shapes) != checkpoint.tp_degree or (not traits.shard_widths and len(set(shapes.values())) > 1):
            raise UserError(f"{name}: expected a shape for each tensor-parallel rank, found {shapes}")
    return {name: [shapes[tp] for tp in range(checkpoint.tp_degree)] for name, shapes in found.items()}


def _common_state(checkpoint: Checkpoint) -> TorchOutput:
    first = checkpoint.ranks[0].file
    return saved("zero/optimizer_state.pt", checkpoint.optimizer_state, first)
