"""Merge the tensor-parallel slices of parameters, each parameter by its rule."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_patches.convert import layout, rules
from ckpt_patches.convert.layout import Block, Layout
from ckpt_patches.convert.output_files import Content, StateOf, TorchOutput, tensor
from ckpt_patches.convert.rules import Rule, Rules
from ckpt_patches.errors import UserError
from ckpt_patches.formats.pickles import Global, Instance, stub
from ckpt_patches.formats.universal import state_file
from ckpt_patches.formats.zero import ElementType, Shape
from ckpt_patches.formats.zero_experts import Experts

States = Mapping[str, tuple[ElementType, Sequence[StateOf]]]  # by state: its element type, and it on each slice


class Merge:
    """Merges tensor-parallel slices, each parameter by its rule."""

    def __init__(self, info: dict[str, Any], strict: bool) -> None:
        self.strict, self.rules = strict, Rules(info)

    def outputs(self, name: str, shapes: Sequence[Shape], states: States) -> Iterator[TorchOutput]:
        """The files of a parameter's states; `states` has the element type and slices of each."""
        rule = self.rules.of(name)
        how, placed, entries = self._placed(name, rule, shapes)
        layout.check(name, placed, shapes)
        if rule.original_vocab_size is not None:
            placed, entries = _without_padding(name, placed, rule), {**entries, "vocab_tensor": True}
        for key, (kind, slices) in states.items():
            contents = {"0": Content(kind.dtype, placed, tuple(slices), how)}
            value = {**entries, "param": tensor("0", kind, placed.shape)}
            yield TorchOutput(state_file(name, key), value, contents)

    def _placed(self, name: str, rule: Rule, shapes: Sequence[Shape]) -> tuple[str, Layout, dict[str, Any]]:
        """How the slices are combined, their layout, and the entries to save beside the parameter."""
        if rule.affine_map is not None:
            return "place", layout.affine(name, rule.affine_map, shapes), {}
        if rule.how in (rules.REPLICATED, rules.AVERAGED):
            return ("place" if rule.how == rules.REPLICATED else "averaged"), layout.replicated(name, shapes), {}
        if rule.how == rules.TWO_SUB_PARAMS:
            return "place", layout.in_two_halves(name, shapes), {"cat_dim": 0, "param_n_sub_params": 2}
        if rule.sub_params:
            placed, described = layout.sub_params(name, rule.sub_params, shapes)
            return "place", placed, {"sub_param_shape": _sub_param_shape(rule.sub_params, described)}
        dim = 1 if rule.how == rules.ROW_PARALLEL else 0
        return "place", layout.concatenated(name, shapes, dim), {"cat_dim": dim}

    def check_patterns(self) -> list[str]:
        """Warnings about unmatched patterns: most likely mistyped, so that parameters are merged wrongly."""
        if not self.rules.unused:
            return []
        text = f"no parameter matches the patterns {', '.join(sorted(self.rules.unused))}"
        if self.strict:
            raise UserError(f"{text} of the checkpoint's universal_checkpoint_info, so that some may be merged wrongly")
        return [text]


def expert_outputs(name: str, experts: Experts, shapes: Sequence[Shape], states: States) -> Iterator[TorchOutput]:
    """The files of a parameter of AutoEP's experts; `states` has the slices by expert-parallel rank."""
    placed = stacked(name, experts, shapes)
    layout.check(name, placed, shapes)
    for key, (kind, slices) in states.items():
        value = {"param": tensor("0", kind, placed.shape), "cat_dim": 0}
        marks = {"is_expert_param": True, "ep_num_experts": experts.count}
        yield TorchOutput(state_file(name, key), {**value, **marks}, {"0": Content(kind.dtype, placed, tuple(slices))})


def _without_padding(name: str, placed: Layout, rule: Rule) -> Layout:
    if len(placed.shape) < 2 or rule.original_vocab_size is None:
        raise UserError(f"{name} is of the vocabulary; expected rows, found the shape {placed.shape}")
    return replace(placed, shape=(min(rule.original_vocab_size, placed.shape[0]), *placed.shape[1:]))


def _sub_param_shape(sub: rules.SubParams, shape: Sequence[Any]) -> Instance:
    """Upstream's own record of sub-parameters, which is pickled by its class."""
    kind: Global = stub("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
    record: Instance = kind.__new__(kind)  # type: ignore[call-overload]
    record.state = {"patterns": sub.patterns, "shape": shape, "partition_dim": sub.partition_dim}
    return record


def stacked(name: str, experts: Experts, shapes: Sequence[Shape]) -> Layout:
    """The layout of each rank's experts in the full parameter; `shapes` are by expert-parallel rank.

    Raises:
        UserError: the shapes do not fit the numbers of experts, or the recorded affine map differs.
    """
    for ep, (shape, held) in enumerate(zip(shapes, experts.held, strict=True)):
        if not shape or shape[0] != len(held) or shape[1:] != shapes[0][1:]:
            raise UserError(
                f"{name}: expected {len(held)} experts on expert-parallel rank {ep}, found the shape {shape}"
            )
    each = layout.whole(shapes[0][1:]).blocks
    numel = each[0].length if each else 0
    found = Layout((experts.count, *shapes[0][1:]), *_blocks(experts.held, numel))
    if experts.recorded is not None and numel:
        recorded = layout.affine(name, experts.recorded, shapes)
        if recorded.shape != found.shape or _places(recorded, numel) != _places(found, numel):
            raise UserError(f"{name}: the affine map that is recorded of it is not that of its experts' placement")
    return found


def _blocks(held: Sequence[Sequence[int]], numel: int) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """One block per expert, and blocks of further copies of experts."""
    blocks: dict[int, Block] = {}
    copies = []
    for ep, experts in enumerate(held):
        for index, expert in enumerate(experts):
            block = Block(ep, index * numel, numel, expert * numel, numel, numel, 1)
            if blocks.setdefault(expert, block) is not block:
                copies.append(block)
    return (tuple(blocks.values()), tuple(copies)) if numel else ((), ())


def _places(placed: Layout, numel: int) -> set[tuple[int, float, float]]:
    """The slice, index in the slice, and number of each expert."""

    def experts(block: Block) -> Iterator[tuple[int, float, float]]:
        for row in range(block.count):
            source, target = block.source + row * block.source_stride, block.target + row * block.target_stride
            for at in range(0, block.length, numel):
                yield block.slice, (source + at) / numel, (target + at) / numel

    return {place for block in (*placed.blocks, *placed.copies) for place in experts(block)}
