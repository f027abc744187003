"""torch.distributed.checkpoint as training scripts write it: which tensors are weights, and which optimizer states.

The keys of nested dicts are joined by dots: `model.<parameter>` (scripts can use another prefix),
`optimizer.state.<parameter>.<state>`, and `optimizer.param_groups.<number>.<setting>` or, flattened,
`optimizer.param_groups.<parameter>.<setting>` (Megatron-FSDP: `optimizer.param_to_group_meta.…`). Without
`get_state_dict` the optimizer's parameters are numbers.
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_patches.formats.checkpoint import Extent
from ckpt_patches.formats.ranged import read_metadata
from ckpt_patches.formats.torch_dist import INDEX, LARGEST, Index, Tensor
from ckpt_patches.runtime.shown import shown

STATE, GROUPS = "state.", "param_groups"
# The parts of a name at which an optimizer's param groups and states begin.
OF_GROUPS = re.compile(r"(?:^|(?<=\.))(?:param_groups|param_to_group_meta)(?=\.|$)")
OF_STATES = re.compile(r"(?:^|(?<=\.))state(?=\..+\.)")
MASTERS = ("master_param", "master_weight", "fp32_param")  # optimizer states next to a 16-bit weight
OF_MEGATRON_FSDP = "param_to_group_meta"  # Megatron-FSDP's param groups, by parameter
WRAPPER = "module."  # prefix of Megatron-FSDP's parameters in the optimizer, not of its weights
# States that identify an optimizer's part of a checkpoint. Optimizers with other states have some of these, too.
KNOWN_STATES = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer", "sum", "master_param")
# Accelerate, NeMo Automodel and others write the model and the optimizer into sibling folders.
MODEL_FOLDER = re.compile(r"model|weights|(?:pytorch_)?model_fsdp_\d+")
OPTIMIZER_FOLDER = re.compile(r"optim(?:izer)?(?:_\d+)?")
NUMBER = re.compile(r"_(\d+)$")  # of a model's and its optimizer's folder
OF_MODELS = ("model", "module", "state_dict", "app")  # prefixes of the weights, if there are also copies
ITERATION = re.compile(r"iter_\d{7,}")  # Megatron-LM's folders
BY_MEGATRON_CORE = (b"/shard_", *(b"optimizer.state.%b." % state for state in (b"exp_avg", b"param", b"fp32_param")))
SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Optimizer:
    """An optimizer's part of a checkpoint: names of tensors and objects in the index."""

    prefix: str  # of all its names, such as "optimizer."
    states: Mapping[str, Mapping[str, str]]  # by parameter (as the optimizer names it) and state
    groups: Mapping[str, Mapping[str, str]]  # by group number or parameter ("": one object has all), and setting
    weights: dict[str, str] = field(default_factory=dict)  # the model's weights, by parameter
    several: tuple[str, ...] = ()  # candidate prefixes of the weights, if ambiguous

    @property
    def is_numbered(self) -> bool:
        """Whether its parameters are numbers, in the order in which the script passed them to it."""
        return bool(self.states) and all(name.isdecimal() for name in self.states)


def folders(path: Path) -> list[Path]:
    """The folders of one checkpoint: `path` if it has an index, or else the model and optimizer folders below it."""
    if (path / INDEX).is_file():
        return [path]
    below = sorted(one for one in path.iterdir() if one.is_dir() and is_begun(one))
    models, optimizers = (
        [one for one in below if kind.fullmatch(one.name)] for kind in (MODEL_FOLDER, OPTIMIZER_FOLDER)
    )
    return models + optimizers if models and optimizers else []


def merged(path: Path, indexes: Iterable[tuple[Path, Index]]) -> Index:
    """Merge the indexes of a checkpoint's folders. Files, and names in two indexes, get their folder as prefix."""
    indexes = list(indexes)
    before = _before([folder.name for folder, _ in indexes])
    tensors: dict[str, Tensor] = {}
    objects: dict[str, Extent] = {}
    absent: list[str] = []
    for folder, own in indexes:
        inner = folder.relative_to(path)
        names = {name: f"{before.get(folder.name, '')}{name}" for name in (*own.tensors, *own.objects)}
        both = (tensors.keys() | objects.keys()) & set(names.values())
        called = {name: f"{inner}/{its}" if its in both else its for name, its in names.items()}
        for name, tensor in own.tensors.items():
            places = {at: _within(inner, place) for at, place in tensor.places.items()}
            tensors[called[name]] = replace(tensor, name=called[name], places=places)
        objects.update({called[name]: _within(inner, place) for name, place in own.objects.items()})
        absent += own.absent
    return Index(tensors, objects, tuple(absent))


def _before(folders: list[str]) -> dict[str, str]:
    """What all names of a folder begin with, by folder, if a checkpoint has several models or optimizers.

    `pytorch_model_fsdp_1` and `optimizer_1` belong together. Several optimizers can also be of one model.
    """
    models, optimizers = ([one for one in folders if kind.fullmatch(one)] for kind in (MODEL_FOLDER, OPTIMIZER_FOLDER))
    if len(models) > 1:
        return {folder: f"{number[1]}." for folder in folders if (number := NUMBER.search(folder))}
    return {folder: f"{folder}/" for folder in optimizers} if len(optimizers) > 1 else {}


def _within(folder: Path, place: Extent) -> Extent:
    return place._replace(path=str(folder / place.path))


def is_begun(folder: Path) -> bool:
    """Whether a folder has an index or a rank's file; the index is written last."""
    return (folder / INDEX).is_file() or next(folder.glob("*.distcp"), None) is not None


def is_by_megatron_core(path: Path) -> bool:
    """Whether an index has megatron-core's own format. Searches the pickle's bytes for the format's names.

    With FSDP, Megatron-LM writes torch's format, into folders with the same names.
    """
    try:
        data = read_metadata(path / INDEX, LARGEST)
    except OSError:
        return False
    is_its_own = any(name in data for name in BY_MEGATRON_CORE)
    return is_its_own or (ITERATION.fullmatch(path.name) is not None and b"checkpoint_version" not in data)


def optimizers(tensors: Iterable[str], objects: Iterable[str]) -> list[Optimizer]:
    """The optimizers of a checkpoint, from the names of its tensors and objects."""
    tensors = list(tensors)
    names = [*tensors, *objects]
    of_groups = {name[: own.start()] for name in names for own in OF_GROUPS.finditer(name)}
    prefixes = sorted({*of_groups, *(own for name in names for own in _state_prefix(name, of_groups))})
    left = others(tensors, prefixes)
    return [_optimizer(prefix, names, left) for prefix in prefixes]


def others(tensors: Iterable[str], prefixes: Iterable[str]) -> list[str]:
    """The tensors that are of none of the optimizers with these prefixes."""
    return [name for name in tensors if not any(_is_of(prefix, name) for prefix in prefixes)]


def _state_prefix(name: str, of_groups: set[str]) -> list[str]:
    """The optimizer's prefix of a state's name, possibly empty. Prefers an optimizer whose param groups exist."""
    if name.rpartition(".")[2] not in KNOWN_STATES:
        return []
    found = [name[: own.start()] for own in OF_STATES.finditer(name)]
    return [own for own in found if own in of_groups][-1:] or found[:1]


def _is_of(prefix: str, name: str) -> bool:
    rest = name.removeprefix(prefix)
    return name.startswith(prefix) and (rest.startswith(STATE) or rest.partition(".")[0] in (GROUPS, OF_MEGATRON_FSDP))


def _optimizer(prefix: str, names: list[str], others: list[str]) -> Optimizer:
    own = [name for name in names if _is_of(prefix, name)]
    wrapper = WRAPPER if any(name.startswith(f"{prefix}{OF_MEGATRON_FSDP}.") for name in own) else ""
    of_states = {
        name[len(prefix) + len(STATE) :].removeprefix(wrapper): name
        for name in own
        if name.startswith(f"{prefix}{STATE}")
    }
    of_groups = {
        name[len(prefix) :].partition(".")[2].removeprefix(wrapper): name
        for name in own
        if not name.startswith(f"{prefix}{STATE}")
    }
    # An optimizer without states names its parameters in flattened groups alone.
    # A state can be a nested dict, as bitsandbytes has it: then only known states name the parameter before them.
    own_names = [rest for rest in of_states if rest.rpartition(".")[2] in KNOWN_STATES] or of_states or of_groups
    of_model, several = model_prefix(prefix, {rest.rpartition(".")[0] for rest in own_names}, others)
    known = set() if of_model is None else {n.removeprefix(of_model) for n in others if n.startswith(of_model)}
    states: dict[str, dict[str, str]] = {}
    for rest, name in of_states.items():
        parameter = _parameter(rest, known)
        states.setdefault(parameter, {})[rest[len(parameter) + 1 :]] = name
    groups: dict[str, dict[str, str]] = {}
    parameters = states.keys() | known
    for rest, name in of_groups.items():
        group, setting = _group(rest, parameters)
        groups.setdefault(group, {}).setdefault(setting, name)
    weights = {} if of_model is None else {name: f"{of_model}{name}" for name in states if name in known}
    return Optimizer(prefix, states, groups, weights, several)


def _group(rest: str, parameters: Set[str]) -> tuple[str, str]:
    """Group and setting of `<number>.<setting>[.<index>]` or `<parameter>.<setting>`; a list has indexes."""
    group, _, setting = rest.rpartition(".")
    number, _, own = rest.partition(".")
    return (number, own.partition(".")[0]) if group not in parameters and number.isdecimal() else (group, setting)


def groups(own: Optimizer, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The param groups with their parameters' keys. Settings stored per parameter are merged into groups."""
    if set(own.groups) == {""}:
        listed = values[own.groups[""][""]] if "" in own.groups[""] else None
        return [group for group in listed if isinstance(group, dict)] if isinstance(listed, list) else []
    found: dict[Any, dict[str, Any]] = {}
    for key, names in own.groups.items():
        group = {setting: values[name] for setting, name in names.items()}
        if "params" in group:
            found[key] = group
        else:
            alike = tuple(sorted((setting, _key(value)) for setting, value in group.items()))
            same = found.setdefault(alike, {**group, "params": []})
            same["params"].append(key)
    return list(found.values())


def _key(value: Any) -> tuple[str, Any]:
    """A key for a setting: the same for equal numbers, strings and lists of these, and for what looks the same."""
    if isinstance(value, list | tuple) and all(type(one) in SCALARS for one in value):
        return "", tuple((type(one).__name__, one) for one in value)
    return (type(value).__name__, value) if type(value) in SCALARS else ("", shown(value))


def _parameter(rest: str, known: set[str]) -> str:
    """The parameter of `<parameter>.<state>`. A state can be a nested dict: then the model's names decide.

    A list, as LBFGS has it, is `<parameter>.<state>.<index>`.
    """
    whole, _, last = rest.rpartition(".")
    whole = whole.rpartition(".")[0] if last.isdecimal() and "." in whole else whole
    parameter = whole
    while parameter and parameter not in known:
        parameter = parameter.rpartition(".")[0]
    return parameter or whole


def model_prefix(prefix: str, parameters: set[str], names: list[str]) -> tuple[str | None, tuple[str, ...]]:
    """The prefix of an optimizer's weights, None if it has no weights; and all candidates if it is ambiguous."""
    found: Counter[str] = Counter()
    for parameter in itertools.islice(sorted(parameters, key=len, reverse=True), 16):
        if not parameter.isdecimal():
            ends = [name for name in names if name == parameter or name.endswith(f".{parameter}")]
            found.update(name[: len(name) - len(parameter)] for name in ends)
    most = sorted(own for own, count in found.items() if count == max(found.values()))
    beside = max((_in_common(prefix, own) for own in most), default=0)
    most = [own for own in most if _in_common(prefix, own) == beside]  # of several models, the one in the same trainer
    own_words = re.split(r"[._/]", prefix)
    named = [own for own in most if own.rstrip(".") in own_words]  # `optimizer_G.` is of `G.`
    most = named if len(named) == 1 else most
    if len(most) > 1:
        owners = {one: [part for part in one.split(".")[:-1] if part not in OF_MODELS] for one in most}
        least = min(owners.values(), key=len)
        # The others are copies only if their names begin with that of its owner, and go on.
        first, *others = sorted(most, key=lambda one: len(owners[one]))
        if all(len(owners[one]) > len(least) and owners[one][: len(least)] == least for one in others):
            return first, ()
        return None, tuple(most)
    return (most[0], ()) if most else (None, ())


def weights_prefix(tensors: Iterable[str], every: Sequence[Optimizer], parameters: set[str]) -> str | None:
    """The prefix of the weights of these parameters; None if it has no weights, or is ambiguous.

    Args:
        tensors: the names of all tensors.
        every: the optimizers of them.
        parameters: names without a prefix.
    """
    found = {own.weights[name].removesuffix(name) for own in every for name in own.weights.keys() & parameters}
    if found:
        return found.pop() if len(found) == 1 else None
    return model_prefix("", parameters, others(tensors, [own.prefix for own in every]))[0]


def _in_common(one: str, other: str) -> int:
    """The number of leading parts that two prefixes share."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), other.split("."), strict=False))
    return sum(bool(part) for part, _ in pairs)


def is_dcp(path: Path) -> bool:
    """Whether a folder is such a checkpoint, and not one of megatron-core."""
    found = folders(path)
    return bool(found) and not (found == [path] and is_by_megatron_core(path))
