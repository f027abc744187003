"""torch.distributed.checkpoint as training scripts write it: which tensors are weights, and which optimizer states.

The keys of nested dicts are joined by dots: `model.<parameter>`, `optimizer.state.<parameter>.<state>`, and
`optimizer.param_groups.<number>.<setting>` or, flattened, `optimizer.param_groups.<parameter>.<setting>`
(Megatron-FSDP: `optimizer.param_to_group_meta.…`). Without `get_state_dict` the optimizer's parameters are numbers.
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_patches.formats.checkpoint import Extent
from ckpt_patches.formats.pickles import DEEPEST, NotReadError
from ckpt_patches.formats.ranged import read_metadata
from ckpt_patches.formats.torch_dist import COMMON, INDEX, LARGEST, Index
from ckpt_patches.runtime.shown import shown

# Where trainers write an optimizer, and the weights that it steps: the first place that has them counts.
LAYOUTS = {
    # Scripts, Accelerate and Megatron-FSDP; FSDP's wrapper; Lightning; TorchTitan.
    r"(.*\.)?optim(?:izer)?(?:_\d+)?\.": (r"\1model.", r"\1module.", r"\1state_dict.", r"\1"),
    r"(.*\.)?optimizers\.[^.]+\.": (r"\1model.",),  # Composer
    r"(.*\.)?optimizer_([^.]+)\.": (r"\1\2.", r"\1model_\2."),  # scripts with several models
    r"()": ("",),
}
STATE, GROUPS, OF_MEGATRON_FSDP = "state", "param_groups", "param_to_group_meta"
# The parts of a name at which an optimizer's param groups and states begin.
OF_GROUPS = re.compile(rf"(?:^|(?<=\.))(?:{GROUPS}|{OF_MEGATRON_FSDP})(?=\.|\Z)")
OF_STATES = re.compile(rf"(?:^|(?<=\.)){STATE}(?=\..+\.)")
OF_EITHER = re.compile(rf"{OF_GROUPS.pattern}|(?:^|(?<=\.)){STATE}(?=\.)")
MASTERS = ("master_param", "master_weight", "fp32_param")  # optimizer states next to a 16-bit weight
WRAPPER = "module."  # prefix of Megatron-FSDP's parameters in the optimizer, not of its weights
# States that identify an optimizer's part of a checkpoint. Optimizers with other states have some of these, too.
KNOWN_STATES = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer", "sum", "master_param")
ENOUGH = 16  # parameters that show where the weights are
MOST_PLACES = 10_000_000  # to compare: of each optimizer's weights, as many as tensors have the same last parts
# Accelerate, NeMo Automodel and others write the model and the optimizer into sibling folders.
KINDS_OF_FOLDERS = [
    re.compile(r"(?:(?:pytorch_)?model_fsdp_(\d+))|model|weights"),
    re.compile(r"optim(?:izer)?(?:_(\d+))?"),
]
BY_MEGATRON_CORE = (b"/shard_", *(b"optimizer.state.%b." % state for state in (b"exp_avg", b"param", b"fp32_param")))


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
    kinds = [[one for one in below if kind.fullmatch(one.name)] for kind in KINDS_OF_FOLDERS]
    return [one for kind in kinds for one in kind] if all(kinds) else []


def is_begun(folder: Path) -> bool:
    """Whether a folder has an index or a rank's file; the index is written last."""
    return (folder / INDEX).is_file() or next(folder.glob("*.distcp"), None) is not None


def is_dcp(path: Path) -> bool:
    """Whether a folder is such a checkpoint, and not one of megatron-core."""
    found = folders(path)
    return bool(found) and not (found == [path] and _is_by_megatron_core(path))


def _is_by_megatron_core(path: Path) -> bool:
    """Whether an index has megatron-core's own format. Searches the pickle's bytes for the format's names.

    With FSDP, Megatron-LM writes torch's format, into folders with the same names.
    """
    try:
        data = read_metadata(path / INDEX, LARGEST)
    except OSError:
        return False
    is_its_own = any(name in data for name in BY_MEGATRON_CORE)
    return is_its_own or (path / COMMON).exists()  # which megatron-core writes first


def merged(path: Path, indexes: Iterable[tuple[Path, Index]]) -> Index:
    """Merge the indexes of a checkpoint's folders. Files, and names in two indexes, get their folder as prefix.

    Of several models or optimizers, all names of a folder begin with its number: `optimizer_1` steps
    `pytorch_model_fsdp_1`, or one of several optimizers steps the only model.
    """
    indexes = list(indexes)
    matches = [[kind.fullmatch(folder.name) for folder, _ in indexes] for kind in KINDS_OF_FOLDERS]
    are_several = any(sum(map(bool, own)) > 1 for own in matches)
    found = Index({}, {})
    for (folder, own), *kinds in zip(indexes, *matches, strict=True):
        inner = folder.relative_to(path)
        number = next((match[1] for match in kinds if match and match[1]), folder.name)
        for name in (*own.tensors, *own.objects):
            called = f"{number}.{name}" if are_several else name
            called = f"{inner}/{called}" if called in found.tensors or called in found.objects else called
            if name in own.objects:
                found.objects[called] = _within(inner, own.objects[name])
                continue
            places = {at: _within(inner, place) for at, place in own.tensors[name].places.items()}
            found.tensors[called] = replace(own.tensors[name], name=called, places=places)
    absent, same_places = (
        [one for _, own in indexes for one in own.absent],
        [two for _, own in indexes for two in own.same_places],
    )
    return replace(found, absent=tuple(absent), same_places=tuple(same_places))


def _within(folder: Path, place: Extent) -> Extent:
    return place._replace(path=str(folder / place.path))


def optimizers(tensors: Iterable[str], objects: Iterable[str]) -> list[Optimizer]:
    """The optimizers of a checkpoint, from the names of its tensors and objects. Each parameter can have its own.

    Raises:
        NotReadError: a name has too many parts, or the weights could be in too many places.
    """
    tensors = list(tensors)
    names = [*tensors, *objects]
    if deep := next((name for name in names if name.count(".") > DEEPEST), None):
        raise NotReadError(f"expected names of at most {DEEPEST} parts, found {shown(deep)}")
    of_groups = {name[: own.start()] for name in names for own in OF_GROUPS.finditer(name)}
    prefixes = {*of_groups, *(own for name in names for own in _state_prefix(name, of_groups))}
    own: dict[str, list[str]] = {prefix: [] for prefix in sorted(prefixes)}
    for name in names:
        for prefix in _prefixes(name) & prefixes:
            own[prefix].append(name)
    parts = {prefix: _states_and_groups(prefix, of_prefix) for prefix, of_prefix in own.items()}
    left = others(tensors, prefixes)
    chosen = {prefix: _chosen(_parameters(*of_prefix)) for prefix, of_prefix in parts.items()}
    ends = _by_end(left, {parameter for of_prefix in chosen.values() for parameter in of_prefix})
    if sum(len(ends[parameter]) for of_prefix in chosen.values() for parameter in of_prefix) > MOST_PLACES:
        raise NotReadError(f"expected at most {MOST_PLACES} places of {len(chosen)} optimizers' weights, found more")
    known = {*left}
    return [
        _optimizer(prefix, *of_prefix, _places_of_weights(prefix, chosen[prefix], ends), known)
        for prefix, of_prefix in parts.items()
    ]


def others(tensors: Iterable[str], prefixes: Iterable[str]) -> list[str]:
    """The tensors that are of none of the optimizers with these prefixes."""
    prefixes = {*prefixes}
    return [name for name in tensors if prefixes.isdisjoint(_prefixes(name))]


def _state_prefix(name: str, of_groups: set[str]) -> list[str]:
    """The optimizer's prefix of a state's name, possibly empty. Prefers an optimizer whose param groups exist."""
    if name.rpartition(".")[2] not in KNOWN_STATES:
        return []
    found = [name[: own.start()] for own in OF_STATES.finditer(name)]
    return [own for own in found if own in of_groups][-1:] or found[:1]


def _prefixes(name: str) -> set[str]:
    """The prefixes that an optimizer with a state or setting of this name can have."""
    return {name[: own.start()] for own in OF_EITHER.finditer(name)}


def _states_and_groups(prefix: str, own: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The names of an optimizer's states, and of its settings, without what all of them begin with."""
    of_states: dict[str, str] = {}
    of_groups: dict[str, str] = {}
    wrapper = WRAPPER if any(name.startswith(f"{prefix}{OF_MEGATRON_FSDP}.") for name in own) else ""
    for name in own:
        kind, _, rest = name[len(prefix) :].partition(".")
        (of_states if kind == STATE else of_groups)[rest.removeprefix(wrapper)] = name
    return of_states, of_groups


def _parameters(of_states: Iterable[str], of_groups: Iterable[str]) -> set[str]:
    # An optimizer without states names its parameters in flattened groups alone.
    # A state can be a nested dict, as bitsandbytes has it: then only known states name the parameter before them.
    named = [rest for rest in of_states if rest.rpartition(".")[2] in KNOWN_STATES] or of_states or of_groups
    return {rest.rpartition(".")[0] for rest in named}


def _optimizer(
    prefix: str, of_states: dict[str, str], of_groups: dict[str, str], places: list[str], others: set[str]
) -> Optimizer:
    """`places` are the prefixes that its weights can have, which are some of the other tensors."""
    of_model, known = (places[0], others) if len(places) == 1 else ("", set[str]())
    states: dict[str, dict[str, str]] = {}
    for rest, name in of_states.items():
        parameter = _parameter(rest, of_model, known)
        states.setdefault(parameter, {})[rest[len(parameter) + 1 :]] = name
    groups: dict[str, dict[str, str]] = {}
    for rest, name in of_groups.items():
        group, _, setting = rest.rpartition(".")
        number, _, of_number = rest.partition(".")
        if group not in states and f"{of_model}{group}" not in known and number.isdecimal():
            group, setting = number, of_number.partition(".")[0]  # a list has indexes
        groups.setdefault(group, {}).setdefault(setting, name)
    weights = {name: weight for name in states if (weight := f"{of_model}{name}") in known}
    return Optimizer(prefix, states, groups, weights, tuple(places) if len(places) > 1 else ())


def _parameter(rest: str, of_model: str, known: set[str]) -> str:
    """The parameter of `<parameter>.<state>`. A state can be a nested dict: then the model's names decide.

    A list, as LBFGS has it, is `<parameter>.<state>.<index>`.
    """
    whole, _, last = rest.rpartition(".")
    whole = whole.rpartition(".")[0] if last.isdecimal() and "." in whole else whole
    parameter = whole
    while parameter and f"{of_model}{parameter}" not in known:
        parameter = parameter.rpartition(".")[0]
    return parameter or whole


def _chosen(parameters: Iterable[str]) -> list[str]:
    """The parameters that show where the weights are."""
    return [own for own in sorted(parameters, key=len, reverse=True) if not own.isdecimal()][:ENOUGH]


def _by_end(names: Iterable[str], ends: Iterable[str]) -> dict[str, list[str]]:
    """What is before each of these ends in the names that have it as their last parts."""
    found: dict[str, list[str]] = {end: [] for end in ends}
    for name in names:
        for begin in (0, *(dot.end() for dot in re.finditer(r"\.", name))):
            if (end := name[begin:]) in found:
                found[end].append(name[:begin])
    return found


def _places_of_weights(prefix: str, parameters: Iterable[str], ends: Mapping[str, list[str]]) -> list[str]:
    """The prefixes that the weights of an optimizer can have: that of a known layout, or all that fit as well."""
    found = Counter(place for parameter in parameters for place in ends[parameter])
    highest = max(found.values(), default=0)
    most = sorted(own for own, count in found.items() if count == highest)
    for pattern, layouts in LAYOUTS.items():
        if match := re.fullmatch(pattern, prefix):
            in_same_trainer = [place for place in most if place.startswith(match[1] or "")]
            return [place for place in map(match.expand, layouts) if place in most] or in_same_trainer or most
    shared = {place: _in_common(prefix, place) for place in most}
    longest = max(shared.values(), default=0)
    return [place for place in most if shared[place] == longest]


def _in_common(one: str, other: str) -> int:
    """The number of leading parts that two prefixes share."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def weights_prefix(tensors: Iterable[str], every: Sequence[Optimizer], parameters: set[str]) -> str | None:
    """The prefix of the weights of these parameters; None if it has no weights, or is ambiguous.

    Args:
        tensors: the names of all tensors.
        every: the optimizers of them.
        parameters: names without a prefix.
    """
    found = {own.weights[name].removesuffix(name) for own in every for name in own.weights.keys() & parameters}
    chosen = _chosen(parameters)
    ends = _by_end(others(tensors, [own.prefix for own in every]), chosen)
    places = found or _places_of_weights("optimizer.", chosen, ends)
    return next(iter(places)) if len(places) == 1 else None


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
            alike = tuple(sorted((setting, shown(value)) for setting, value in group.items()))
            found.setdefault(alike, {**group, "params": []})["params"].append(key)
    return list(found.values())
