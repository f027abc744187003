"""The facts that the inventory of a ZeRO checkpoint needs from its files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_patches.formats import checksum, torch_file, zero, zero_experts, zero_inventory, zero_keys
from ckpt_patches.formats.torch_file import BadFileError, TorchFile
from ckpt_patches.formats.zero import Partition, RankState
from ckpt_patches.formats.zero_inventory import ModelFacts, RankFacts
from ckpt_patches.runtime.shown import shown

# Keys of a model-states file that the inventory reads, and those of which it reads only the names.
OF_A_MODEL = (
    *zero_keys.OF_THE_MODEL,
    *("iteration", "param_shapes", "frozen_param_shapes", "buffer_names", "shared_params", "num_experts"),
    *(zero_experts.KEY, zero_experts.LEGACY_KEY),
)
NAMED = ("module", "frozen_param_fragments")


class Unlike(NamedTuple):
    """The differences of a model-states file from another one. There are many files, which are nearly equal."""

    name: str
    root: str
    changed: dict[str, Any]
    absent: tuple[str, ...]

    def facts(self, first: Mapping[str, Any]) -> ModelFacts:
        """The file's facts. `first` is the content of the other file."""
        value = {**_looked_at(first), **self.changed}
        return ModelFacts(self.name, {key: value[key] for key in value.keys() - {*self.absent}}, self.root)


def unlike(facts: ModelFacts, first: Mapping[str, Any]) -> Unlike:
    own, other = _looked_at(facts.value), _looked_at(first)
    changed = {key: value for key, value in own.items() if key not in other or value != other[key]}
    return Unlike(facts.name, facts.root, changed, tuple(other.keys() - own.keys()))


def _looked_at(value: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value[key] for key in (*OF_A_MODEL, *NAMED) if key in value}
    return found | {key: dict.fromkeys(own) for key in NAMED if isinstance(own := found.get(key), Mapping)}


def of_rank(file: TorchFile, optimizer: Mapping[str, Any], state: RankState) -> RankFacts:
    """The facts in a rank's file."""
    base = optimizer["optimizer_state_dict" if state.stage > 2 else "base_optimizer_state"]
    crcs = distinctive_checksums(file)
    groups, checksums = [], []
    for number, partition in enumerate(state.partitions):
        own = base["state"].get(number) or {}
        flats = partition.states
        sizes = {zero.MASTER: max(flats[zero.MASTER].numel, flats[zero.MASTER].room)}
        ends = [start + numel for start, numel in partition.fragments.values() if numel]
        # Fragments beyond the end of the partition are reported separately.
        needed = min(max(ends, default=0), numel_of(partition)) if state.stage < 3 else numel_of(partition)
        step: Any = partition.step.number if partition.step else None
        step = shown(partition.step.value) if partition.step and step is None else step
        groups.append(zero_inventory.group_facts(sizes, own, step, needed))
        # AMSGrad's maxima equal exp_avg_sq as long as it grows.
        moments = [flat.offset for key, flat in flats.items() if key != zero.MASTER and not key.startswith("max_")]
        checksums.append(tuple(crcs[offset] for offset in moments if offset in crcs))
    scale = optimizer.get("loss_scaler", optimizer.get("cur_scale"))
    scale = scale.fields.get("cur_scale") if isinstance(scale, torch_file.Instance) else scale
    params = tuple(group for group in state.settings if isinstance(group, dict))
    masters = tuple(crcs[at] for own in state.partitions if (at := own.states[zero.MASTER].offset) in crcs)
    keys = zero_keys.keys_of(file.value)
    return RankFacts(
        file.path.name,
        file.root,
        tuple(groups),
        params,
        scale,
        tuple(checksums),
        masters,
        keys,
        state.data_parallel,
    )


def of_model(file: TorchFile) -> ModelFacts:
    """The facts in a model-states file.

    Raises:
        BadFileError: it does not hold a dict, or has no shapes as `param_shapes`.
    """
    if not isinstance(file.value, dict):
        raise BadFileError(f"{file.path}: expected a dict in it, found {type(file.value).__name__}")
    check_shapes(file.path, file.value)
    return ModelFacts(file.path.name, file.value, file.root)


def check_shapes(path: Path, model: Mapping[str, Any]) -> None:
    """Check that the `param_shapes` of a model-states file are dicts of shapes.

    Raises:
        BadFileError: they are something else.
    """
    groups = model.get("param_shapes") or ()
    if not isinstance(groups, (list, tuple)) or not all(map(_are_shapes, groups)):
        raise BadFileError(f"{path}: expected the shapes of parameters as param_shapes, found {shown(groups)}")


def _are_shapes(group: Any) -> bool:
    return isinstance(group, dict) and all(isinstance(shape, (list, tuple)) for shape in group.values())


def distinctive_checksums(file: TorchFile) -> dict[int, int]:
    """CRC-32 by offset, for storages that are not all zeros. Two are equal if one is a copy of the other."""
    return {s.offset: s.checksum for s in file.storages if s.checksum != checksum.of_zeros(s.nbytes)}


def numel_of(partition: Partition) -> int:
    """Elements of a partition. The main parameter can lack its padding."""
    return max(flat.numel for flat in partition.states.values())
