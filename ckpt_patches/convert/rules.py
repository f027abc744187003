"""How a parameter is merged from tensor-parallel slices, according to `universal_checkpoint_info`.

The format is upstream's: lists of regular expressions for parameter names, and descriptions of sub-parameters.
https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/checkpoint/constants.py
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_patches.convert import layout
from ckpt_patches.convert.layout import Layout, SubParams
from ckpt_patches.convert.source import UpstreamsAloneError
from ckpt_patches.errors import UserError
from ckpt_patches.formats.pickles import Global, Instance, stub
from ckpt_patches.formats.universal import VOCABULARY as IS_VOCABULARY
from ckpt_patches.formats.zero import Shape

REPLICATED = "tp_replicated_parameter_patterns"
AVERAGED = "parameter_to_average_patterns"
ROW_PARALLEL = "parameter_with_row_parallelism_patterns"
VOCABULARY = "vocabulary_parameter_patterns"
TWO_SUB_PARAMS = "parameter_with_2_sub_params_cat_dim_0"
SUB_PARAMS = "parameter_with_sub_params"
SHARD_WIDTHS = "sub_param_shard_widths"
PIPELINE_REPLICATED = "pipeline_replicated_parameter_patterns"
UNSUPPORTED = "autotp_unsupported_parameter_patterns"
LISTS = (REPLICATED, AVERAGED, ROW_PARALLEL, VOCABULARY, TWO_SUB_PARAMS)
AFFINE = "affine_map"


@dataclass(frozen=True)
class Merged:
    """How slices become a parameter."""

    layout: Layout
    entries: dict[str, Any] = field(default_factory=dict)  # to save beside the parameter
    is_each: bool = False  # each slice is the full parameter
    is_averaged: bool = False  # which is the average of the slices


class Rules:
    """Finds how each parameter is merged, and records in `unused` the patterns that have matched no parameter."""

    def __init__(self, info: dict[str, Any]) -> None:
        self.info = info
        entries = info.get(SUB_PARAMS, [])
        self.sub_params = [SubParams(entry["patterns"], entry["shape"], entry["partition_dim"]) for entry in entries]
        self.unused = {pattern for key in LISTS for pattern in self._patterns(key)}
        self.unused.update(pattern for sub_params in self.sub_params for pattern in sub_params.patterns)
        if info.get(UNSUPPORTED):
            raise UserError(f"the checkpoint states that {', '.join(sorted(info[UNSUPPORTED]))} cannot be converted")
        if info.get(AFFINE):
            raise UpstreamsAloneError("the checkpoint has AutoTP's affine maps of its parameters")

    def of(self, name: str, shapes: Sequence[Shape]) -> Merged:
        """How slices of these shapes become a parameter: by the first list that matches, in upstream's order.

        Raises:
            UserError: two patterns of a list match it, or the shapes do not fit the rule.
        """
        found = self._by_lists(name, shapes)
        if not self._matches(VOCABULARY, name):
            return found
        rows, shape = self.info.get("original_vocab_size"), found.layout.shape
        if type(rows) is not int or rows < 0 or len(shape) < 2:
            raise UserError(
                f"{name} is of the vocabulary; expected original_vocab_size and rows, found {rows}, {shape}"
            )
        placed = replace(found.layout, shape=(min(rows, shape[0]), *shape[1:]))  # without padding
        return replace(found, layout=placed, entries={**found.entries, IS_VOCABULARY: True})

    def check_patterns(self, *, strict: bool) -> list[str]:
        """Warnings about unmatched patterns: most likely mistyped, so that parameters are merged wrongly."""
        if not self.unused:
            return []
        text = f"no parameter matches the patterns {', '.join(sorted(self.unused))}"
        if strict:
            raise UserError(f"{text} of the checkpoint's universal_checkpoint_info, so that some may be merged wrongly")
        return [text]

    def is_replicated_in_pipeline(self, name: str) -> bool:
        return any(re.match(pattern, name) for pattern in self.info.get(PIPELINE_REPLICATED, []))

    def _by_lists(self, name: str, shapes: Sequence[Shape]) -> Merged:
        sub_params = self._matching_sub_params(name)
        for key in (REPLICATED, AVERAGED):
            if self._matches(key, name):
                if len(set(shapes)) > 1:
                    raise UserError(f"{name}: expected slices of one shape, found {sorted(set(shapes))}")
                return Merged(layout.whole(shapes[0]), is_each=True, is_averaged=key == AVERAGED)
        if self._matches(TWO_SUB_PARAMS, name):
            return Merged(layout.in_two_halves(name, shapes), {"cat_dim": 0, "param_n_sub_params": 2})
        if sub_params:
            placed, described = layout.sub_params(name, sub_params, shapes)
            return Merged(placed, {"sub_param_shape": _sub_param_shape(sub_params, described)})
        weight = f"{name.removesuffix('bias')}weight"
        if name.endswith(".bias") and self._matching_sub_params(weight):
            raise UserError(
                f"{name}: the checkpoint does not state how it is cut, though {weight} has sub-parameters, as AutoTP "
                "saved it before DeepSpeed 0.19.6: resume on the same ranks with a later release, and convert what it "
                "saves"
            )
        dim = 1 if self._matches(ROW_PARALLEL, name) else 0
        return Merged(layout.concatenated(name, shapes, dim), {"cat_dim": dim})

    def _matches(self, key: str, name: str) -> bool:
        found = [pattern for pattern in self._patterns(key) if re.match(pattern, name)]
        if len(found) > 1:
            raise UserError(f"more than one pattern of {key} matches {name}: {', '.join(found)}")
        self.unused.difference_update(found)
        return bool(found)

    def _patterns(self, key: str) -> Sequence[str]:
        return self.info.get(key) or []

    def _matching_sub_params(self, name: str) -> SubParams | None:
        for sub_params in self.sub_params:
            for pattern in sub_params.patterns:
                if re.match(pattern, name):
                    self.unused.discard(pattern)
                    return replace(sub_params, widths=self._widths(pattern))
        return None

    def _widths(self, pattern: str) -> tuple[tuple[int, ...], ...] | None:
        """The width of each rank's part of a sub-parameter, which checkpoints record since format version 0.4."""
        if self.info.get("universal_checkpoint_version", 0.0) < 0.4:
            return None
        recorded = self.info.get(SHARD_WIDTHS, {}).get(pattern)
        if recorded is None:
            raise UserError(f"expected {SHARD_WIDTHS} of {pattern}, which has sub-parameters; the checkpoint has none")
        return tuple(tuple(shares) for shares in recorded)


def _sub_param_shape(sub: SubParams, shape: Sequence[Any]) -> Instance:
    """Upstream's own record of sub-parameters, which is pickled by its class."""
    kind: Global = stub("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
    record: Instance = kind.__new__(kind)  # type: ignore[call-overload]
    record.state = {"patterns": sub.patterns, "shape": shape, "partition_dim": sub.partition_dim}
    return record
