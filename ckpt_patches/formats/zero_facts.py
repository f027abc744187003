"""The facts that the inventory of a ZeRO checkpoint needs from its model files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_patches.formats import zero_experts, zero_keys
from ckpt_patches.formats.torch_file import BadFileError, TorchFile
from ckpt_patches.formats.zero_inventory import ModelFacts
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
