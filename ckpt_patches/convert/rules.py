"""How a parameter is merged from tensor-parallel slices, according to `universal_checkpoint_info`.

The format is upstream's: lists of regular expressions for parameter names, and descriptions of sub-parameters.
https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/checkpoint/constants.py
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_patches.convert.source import UPSTREAM
from ckpt_patches.errors import UserError

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
AFFINE_VERSION = 1  # the latest that is supported


@dataclass(frozen=True)
class SubParams:
    """Sub-parameters: stored as one parameter, but each sliced on its own."""

    pattern: str
    patterns: Any
    shape: Sequence[Any]  # at `partition_dim` the widths of the sub-parameters, or their number
    partition_dim: int
    widths: tuple[tuple[int, ...], ...] | None = None  # by sub-parameter and tensor-parallel rank, if recorded


@dataclass(frozen=True)
class Rule:
    """How to merge the slices of one parameter: `how` is a constant above, or "" to concatenate along dimension 0."""

    how: str
    sub_params: SubParams | None = None
    affine_map: dict[str, Any] | None = None
    original_vocab_size: int | None = None  # rows after it are padding


class Rules:
    """Finds each parameter's rule, and records in `unused` the patterns that have matched no parameter."""

    def __init__(self, info: dict[str, Any]) -> None:
        self.info = info
        self.sub_params = _sub_params(info)
        self.unused = {pattern for key in LISTS for pattern in self._patterns(key)}
        self.unused.update(pattern for sub_params in self.sub_params for pattern in sub_params.patterns)
        if info.get(UNSUPPORTED):
            raise UserError(f"the checkpoint states that {', '.join(sorted(info[UNSUPPORTED]))} cannot be converted")
        maps = info.get(AFFINE) or {}
        if maps.get("version", AFFINE_VERSION) > AFFINE_VERSION:
            raise UserError(f"the checkpoint has affine maps of version {maps['version']}; {UPSTREAM}")
        self.affine_maps: dict[str, Any] = maps.get("params", {})

    def of(self, name: str) -> Rule:
        """A parameter's rule.

        Raises:
            UserError: two patterns of a list match it.
        """
        affine_map = self._affine_map(name)
        how, sub_params = self._how(name) if affine_map is None else (AFFINE, None)
        vocabulary = None
        if self._matches(VOCABULARY, name):
            vocabulary = self.info.get("original_vocab_size")
            if type(vocabulary) is not int:
                raise UserError(f"{name} is of the vocabulary; expected original_vocab_size, found {vocabulary!r}")
        return Rule(how, sub_params, affine_map, vocabulary)

    def is_replicated_in_pipeline(self, name: str) -> bool:
        return any(re.match(pattern, name) for pattern in self.info.get(PIPELINE_REPLICATED, []))

    def _affine_map(self, name: str) -> dict[str, Any] | None:
        """A parameter's map. It overrides the patterns, which are there for earlier releases and count as used."""
        found = [pattern for pattern in self.affine_maps if re.match(pattern, name)]
        if len(found) > 1:
            raise UserError(f"more than one affine map is of {name}: {', '.join(found)}")
        if not found:
            return None
        for key in LISTS:
            self._matches(key, name)
        self._matching_sub_params(name)
        return dict(self.affine_maps[found[0]])

    def _how(self, name: str) -> tuple[str, SubParams | None]:
        """The first list that matches, in upstream's order."""
        matching = self._matching_sub_params(name)
        for key in (REPLICATED, AVERAGED, TWO_SUB_PARAMS):
            if self._matches(key, name):
                return key, None
        if matching:
            return SUB_PARAMS, matching
        weight = f"{name.removesuffix('bias')}weight"
        if name.endswith(".bias") and self._matching_sub_params(weight):
            raise UserError(
                f"{name}: the checkpoint does not state how it is cut, though {weight} has sub-parameters, as AutoTP "
                "saved it before DeepSpeed 0.19.6: resume on the same ranks with a later release, and convert what it "
                "saves"
            )
        return (ROW_PARALLEL if self._matches(ROW_PARALLEL, name) else ""), None

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
                    return _with_widths(sub_params, pattern, self.info)
        return None


def _sub_params(info: dict[str, Any]) -> Sequence[SubParams]:
    entries = info.get(SUB_PARAMS, [])
    return [SubParams("", entry["patterns"], entry["shape"], entry["partition_dim"]) for entry in entries]


def _with_widths(found: SubParams, pattern: str, info: dict[str, Any]) -> SubParams:
    """Add the width of each rank's part of a sub-parameter, which checkpoints record since format version 0.4."""
    widths = None
    if info.get("universal_checkpoint_version", 0.0) >= 0.4:
        recorded = info.get(SHARD_WIDTHS, {}).get(pattern)
        if recorded is None:
            raise UserError(f"expected {SHARD_WIDTHS} of {pattern}, which has sub-parameters; the checkpoint has none")
        widths = tuple(tuple(shares) for shares in recorded)
    return SubParams(pattern, found.patterns, found.shape, found.partition_dim, widths)
