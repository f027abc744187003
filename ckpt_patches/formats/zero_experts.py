"""Mixtures of experts: which expert-parallel rank holds which experts, from a checkpoint's model-states files.

AutoEP stacks the experts of a layer in three parameters: w1, w2 and w3. A rank has its own experts, and a universal
checkpoint has all of them. In layers of `deepspeed.moe` each expert is a module. A rank numbers its own from 0, so that
ranks have different experts under the same name. https://www.deepspeed.ai/tutorials/mixture-of-experts/
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_patches.errors import UserError
from ckpt_patches.formats.zero import Folder, Shape, required

INFO = "universal_checkpoint_info"
KEY, LEGACY_KEY = "ds_autoep_layers", "autoep_layers"
# Keys of a layer that model-states files keep in a universal checkpoint of stages 1 and 2.
KEPT = ("moe_layer_id", "module_path", "expert_key_prefix", "num_experts", "num_local_experts", "ep_size")
WEIGHTS = ("w1", "w2", "w3")
PATTERNS = "expert_parameter_patterns"
PARTITIONED = "zero3_partitioned"  # the format of stage 3
VERSION = 1  # latest known version of it, of placements and of affine maps
LOCAL = re.compile(r"(.*deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..+)")
# In folder names, so that a rank that numbers its experts from 0 finds no folder, instead of another rank's experts.
GLOBAL = "global_"
DATA_FIRST = "use_data_before_expert_parallelism"


@dataclass(frozen=True)
class Experts:
    """How the experts of a parameter are distributed."""

    count: int
    held: tuple[tuple[int, ...], ...]  # by expert-parallel rank, the experts' numbers in the order of its tensor
    ranks: tuple[tuple[int, ...], ...]  # by expert-parallel rank, its data-parallel ranks in the order of their parts
    recorded: Mapping[str, Any] | None = None  # its affine map, if the checkpoint has one

    @property
    def sharing(self) -> int:
        """The number of data-parallel ranks that share an expert-parallel rank's experts."""
        return len(self.ranks[0])


@dataclass(frozen=True)
class LocalExpert:
    """A parameter name under which each expert-parallel rank has another expert's parameter."""

    names: tuple[str, ...]  # by expert-parallel rank, with the expert's global number
    folders: tuple[str, ...]  # of the output
    ranks: tuple[tuple[int, ...], ...]  # as above

    @property
    def sharing(self) -> int:
        """The number of data-parallel ranks that share an expert-parallel rank's expert."""
        return len(self.ranks[0])


def local_experts(
    path: Path, groups: Sequence[Iterable[str]], sharing: Sequence[int], dp_degree: int, neighbours: bool
) -> dict[str, LocalExpert]:
    """The experts' parameters in layers of `deepspeed.moe`. `groups` has the names, `sharing` the ranks per group.

    Raises:
        UserError: a group mixes parameters of experts and others, or its ranks do not divide evenly.
    """
    matches = [{name: LOCAL.fullmatch(name) for name in names} for names in groups]
    held: dict[str, set[str]] = {}  # by layer; its experts may be in several groups
    for known in (match for of_group in matches for match in of_group.values() if match):
        held.setdefault(known[1], set()).add(known[2])
    found = {}
    for group, of_group in enumerate(matches):
        if not any(of_group.values()):
            continue
        if not all(of_group.values()) or group >= len(sharing) or sharing[group] < 1 or dp_degree % sharing[group]:
            raise UserError(f"{path}: expected the ranks that share group {group}, of experts alone, found {sharing}")
        ranks = ranks_of(dp_degree, dp_degree // sharing[group], neighbours)
        for name, match in of_group.items():
            if match:
                numbers = [ep * len(held[match[1]]) + int(match[2]) for ep in range(len(ranks))]
                names = tuple(f"{match[1]}{number}{match[3]}" for number in numbers)
                folders = tuple(f"{match[1]}{GLOBAL}{number}{match[3]}" for number in numbers)
                found[name] = LocalExpert(names, folders if len(ranks) > 1 else names, ranks)
    return found


def check_local(
    path: Path, known: Mapping[str, LocalExpert], shapes: Mapping[str, Shape], files: Mapping[str, Shape]
) -> None:
    """Check that the optimizer has the same experts as the expert files. `files` has shapes by the names in these.

    Raises:
        UserError: an expert has no file, no state, or other shapes.
    """
    own = {name: shapes[local] for local, expert in known.items() for name in expert.names}
    for name, shape in own.items():
        if files.get(name) != shape:
            raise UserError(
                f"{path}: expected {name} of the shape {shape} in a file layer_*_expert_*, found {files.get(name)}"
            )
    numbered = {match[1] + match[2] for match in map(LOCAL.fullmatch, own) if match}
    for name in files:
        match = LOCAL.fullmatch(name)
        if match and match[1] + match[2] not in numbered:
            raise UserError(f"{path}: expected the optimizer's state of the expert {match[1]}{match[2]}, found none")


def layers_of(path: Path, model: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """AutoEP's layers in a model-states file; None if the file has no such layers.

    Raises:
        UserError: the value is not a list of dicts.
    """
    found = model.get(KEY)
    found = model.get(LEGACY_KEY) if found is None else found
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(layer, dict) for layer in found):
        raise UserError(f"{path}: expected a list of layers in {KEY}, found {found!r:.200}")
    return found


def with_layers(model: dict[str, Any], layers: list[dict[str, Any]] | None, pattern: str) -> dict[str, Any]:
    """A model-states file for the universal checkpoint, which states the parameters of experts."""
    info = {**(model.get(INFO) or {}), PATTERNS: [pattern], KEY: layers}
    return {**model, INFO: info}


def shortened(layers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The layers without their placements, as upstream keeps them at stages 1 and 2."""
    return [{key: layer[key] for key in KEPT if key in layer} for layer in layers]


def joined_layers(models: Sequence[tuple[Path, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The layers of all pipeline stages.

    Raises:
        UserError: two files disagree about a layer.
    """
    found: dict[str, dict[str, Any]] = {}
    for path, model in models:
        for layer in layers_of(path, model) or ():
            prefix = required(layer, "expert_key_prefix", path)
            if found.setdefault(prefix, layer) != layer:
                raise UserError(f"{path} and the files of other ranks contradict each other about the experts {prefix}")
    return list(found.values())


def data_first(models: Sequence[tuple[Path, Mapping[str, Any]]]) -> bool:
    """Whether neighboring ranks have the same experts.

    Raises:
        UserError: the files disagree.
    """
    found = {(model.get("ds_config") or {}).get(DATA_FIRST, False) for _, model in models}
    if len(found) > 1 or not found <= {True, False}:
        raise UserError(
            f"{models[0][0]}: expected one value of {DATA_FIRST} in all files, found {sorted(found, key=str)}"
        )
    return found == {True}


def shares_with_neighbours(model: Mapping[str, Any]) -> bool:
    """Whether a model-states file states that neighboring ranks have the same experts."""
    config = model.get("ds_config")
    return isinstance(config, dict) and config.get(DATA_FIRST) is True


def ranks_of(dp_degree: int, ep_degree: int, neighbours: bool) -> tuple[tuple[int, ...], ...]:
    """The data-parallel ranks of each expert-parallel rank: neighbors, or every `ep_degree`th.

    Raises:
        UserError: the ranks do not divide evenly.
    """
    if ep_degree < 1 or dp_degree % ep_degree:
        raise UserError(
            f"{dp_degree} data-parallel ranks cannot be {ep_degree} expert-parallel ones, and equally many each"
        )
    each = dp_degree // ep_degree
    if neighbours:
        return tuple(tuple(range(ep * each, (ep + 1) * each)) for ep in range(ep_degree))
    return tuple(tuple(range(ep, dp_degree, ep_degree)) for ep in range(ep_degree))


def layers_of_stage_3(path: Path, model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A rank's own layers.

    Raises:
        UserError: the file has no layers, or not in the format of stage 3.
    """
    layers = layers_of(path, model)
    if not layers:
        raise UserError(f"{path}: expected {KEY}, as the files of other ranks have it, found none")
    for layer in layers:
        said = (layer.get("checkpoint_format"), layer.get("checkpoint_format_version"))
        if said != (PARTITIONED, VERSION):
            raise UserError(f"{path}: expected experts in format {PARTITIONED}, version {VERSION}, found {said}")
    return layers


def ranks_by_layers(path: Path, layers: Sequence[Sequence[dict[str, Any]]]) -> tuple[tuple[int, ...], ...]:
    """The data-parallel ranks of each expert-parallel rank, from the layers of each data-parallel rank.

    Raises:
        UserError: the files are inconsistent.
    """
    own = [{(layer["ep_rank"], layer["expert_data_parallel_world_size"]) for layer in of_rank} for of_rank in layers]
    degree = required(layers[0][0], "ep_size", path)
    ranks = tuple(
        tuple(dp for dp, said in enumerate(own) if {ep for ep, _ in said} == {rank}) for rank in range(degree)
    )
    if sorted(dp for of_one in ranks for dp in of_one) != list(range(len(own))) or any(
        {count for _, count in own[dp]} != {len(of_one)} for of_one in ranks for dp in of_one
    ):
        raise UserError(f"{path}: expected each rank on one of {degree} expert-parallel ones, found {own}")
    return ranks


def parameters(path: Path, layers: Sequence[dict[str, Any]], ranks: tuple[tuple[int, ...], ...]) -> dict[str, Experts]:
    """The experts' parameters in layers, by name.

    Raises:
        UserError: a layer omits an expert, has other ranks or an unknown version, or is stored twice.
    """
    found: dict[str, Experts] = {}
    for layer in layers:
        prefix, held = required(layer, "expert_key_prefix", path), _held(path, layer)
        if len(held) != len(ranks):
            raise UserError(f"{path}: {prefix} is on {len(held)} expert-parallel ranks, another layer on {len(ranks)}")
        maps = layer.get("affine_maps") or {}
        if maps.get("version", VERSION) != VERSION:
            raise UserError(f"{path} has affine maps of version {maps['version']}, which is not known")
        for weight in WEIGHTS:
            name = f"{prefix}.{weight}"
            if name in found:
                raise UserError(f"{path} has two layers of the experts {prefix}")
            recorded = required(maps["params"], name, path) if maps else None
            found[name] = Experts(layer["num_experts"], held, ranks, recorded)
    return found


def _held(path: Path, layer: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """The experts of each expert-parallel rank; consecutive ones without a placement, as before 0.19.8."""
    count, local, degree = (required(layer, key, path) for key in ("num_experts", "num_local_experts", "ep_size"))
    placement = layer.get("expert_placement")
    if placement is None:
        held = tuple(tuple(range(ep * local, (ep + 1) * local)) for ep in range(degree))
    else:
        if placement.get("version") != VERSION:
            raise UserError(f"{path} has experts' placements of version {placement.get('version')}, which is not known")
        by_rank = {entry["rank"]: tuple(entry["experts"]) for entry in placement["ranks"]}
        held = tuple(by_rank[ep] for ep in range(degree))
    if {expert for experts in held for expert in experts} != set(range(count)):
        raise UserError(f"{path}: expected {count} experts on the {degree} expert-parallel ranks, found {held}")
    return held


def check_files(folder: Folder, layers: Sequence[dict[str, Any]]) -> None:
    """Check that each expert has one file at stages 1 and 2, of one tensor-parallel rank.

    Raises:
        UserError: an expert has no file, or several.
    """
    for layer in layers:
        for expert in range(layer["num_experts"]):
            prefix = f"layer_{layer['moe_layer_id']}_expert_{expert}_mp_rank_"
            files = folder.starting_with(prefix)
            if len(files) != 1:
                raise UserError(f"{folder.path}: expected one file {prefix}*, found {files or 'none'}")
