"""Put the tensor-parallel slices of parameters together, each parameter by its rule."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_patches.convert import layout, rules
from ckpt_patches.convert.experts import Experts, stacked
from ckpt_patches.convert.headers import Checkpoint
from ckpt_patches.convert.layout import Layout
from ckpt_patches.convert.output_files import Content, Output, Slice, TorchOutput, tensor
from ckpt_patches.convert.rules import Rule, Rules
from ckpt_patches.convert.traits import Traits
from ckpt_patches.errors import UserError
from ckpt_patches.formats.torch_file import Global, Instance, TensorHeader, stand_in
from ckpt_patches.formats.universal import state_file
from ckpt_patches.formats.zero import ElementType, Shape


class Merge:
    """Put tensor-parallel slices together, each parameter by its rule."""

    def __init__(self, checkpoint: Checkpoint, traits: Traits, strict: bool) -> None:
        self.checkpoint, self.traits, self.strict = checkpoint, traits, strict
        self.rules = Rules(checkpoint.info, traits)

    def outputs(
        self, name: str, shapes: Sequence[Shape], states: Mapping[str, tuple[ElementType, Sequence[Slice]]]
    ) -> Iterator[Output]:
        """The files of a parameter's states, of which `states` has the kind and the slices."""
        rule = self.rules.of(name)
        how, placed, entries = self._placed(name, rule, shapes)
        layout.check(name, placed, shapes)
        vocabulary = rule.original_vocab_size is not None
        if vocabulary and self.traits.vocab_tensor:
            placed, entries = _without_padding(name, placed, rule), {**entries, "vocab_tensor": True}
        for key, (kind, slices) in states.items():
            contents = {"0": Content(kind.dtype, placed, tuple(slices), how)}
            value, param = dict(entries), tensor("0", kind, placed.shape)
            if vocabulary and not self.traits.vocab_tensor:
                value["vocab_divisibility_padding_tensor"] = _padding(param, rule, contents)
            yield TorchOutput(state_file(name, key), {**value, "param": param}, contents)

    def _placed(self, name: str, rule: Rule, shapes: Sequence[Shape]) -> tuple[str, Layout, dict[str, Any]]:
        """How the slices are read, where their elements go, and what is saved beside the parameter."""
        if rule.affine_map is not None:
            return "place", layout.affine(name, rule.affine_map, shapes), {}
        if rule.how in (rules.REPLICATED, rules.AVERAGED):
            return ("place" if rule.how == rules.REPLICATED else "averaged"), layout.replicated(name, shapes), {}
        if rule.how == rules.TWO_SUB_PARAMS:
            return "place", layout.in_two_halves(name, shapes), {"cat_dim": 0, "param_n_sub_params": 2}
        if rule.sub_params:
            cut = layout.sub_params_by_widths if self.traits.shard_widths else layout.sub_params_even
            placed, described = cut(name, rule.sub_params, shapes)
            return "place", placed, {"sub_param_shape": _sub_param_shape(rule.sub_params, described)}
        dim = 1 if rule.how == rules.ROW_PARALLEL else 0
        return "place", layout.concatenated(name, shapes, dim), {"cat_dim": dim}

    def check_patterns(self) -> list[str]:
        """Warnings; a pattern that no parameter has used is most likely mistyped, and its parameters came out wrong."""
        if not self.rules.unused or not self.traits.vocab_tensor:
            return []
        text = f"no parameter matches the patterns {', '.join(sorted(self.rules.unused))}"
        if self.strict:
            raise UserError(f"{text} of the checkpoint's universal_checkpoint_info; --no-strict converts nevertheless")
        return [text]


def expert_outputs(
    name: str,
    experts: Experts,
    shapes: Sequence[Shape],
    states: Mapping[str, tuple[ElementType, Sequence[Slice]]],
) -> Iterator[Output]:
    """The files of a parameter of AutoEP's experts, of which `states` has the slices by expert-parallel rank."""
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


def _padding(param: TensorHeader, rule: Rule, contents: dict[str, Content]) -> TensorHeader:
    """What earlier releases keep of a vocabulary's padding, which they leave where it is: its last row, or zeros."""
    rows, columns = param.shape
    if rows > (rule.original_vocab_size or 0):
        return param._replace(start=(rows - 1) * columns, shape=(columns,), stride=(1,))
    contents["1"] = Content("float32", layout.whole((columns,)), (), "zeros")
    return tensor("1", ElementType("float32"), (columns,))


def _sub_param_shape(sub: rules.SubParams, shape: Sequence[Any]) -> Instance:
    """Upstream's own record of it, which it pickles by its class."""
    kind: Global = stand_in("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
    record: Instance = kind.__new__(kind)  # type: ignore[call-overload]
    record.state = {"patterns": sub.patterns, "shape": shape, "partition_dim": sub.partition_dim}
    return record
