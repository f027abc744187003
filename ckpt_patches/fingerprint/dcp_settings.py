"""The settings in checkpoints of torch.distributed.checkpoint, compared with those that the run recorded."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from ckpt_patches.fingerprint.comparison import Checked
from ckpt_patches.fingerprint.record import SETTINGS, STATE, Record, same, whole
from ckpt_patches.fingerprint.verdict import SETTING, Difference
from ckpt_patches.formats import dcp, torch_dist, torch_file
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.torch_dist import Index
from ckpt_patches.runtime.shown import shown

READ = (*SETTINGS, "params", "")  # of the param groups; "" is one object with all of them
EMPTY_GROUP = "param group "  # prefix of the number of a group without parameters
NO_NUMBER = "no number in the files, or in several param groups"
ABSENT = "not in the files under this name"
Place = tuple[str, str]  # a parameter and a setting


def check(path: Path, index: Index, record: Record) -> Checked:
    """Compare the settings in the files with the record. Values besides parameters are compared in a load alone.

    Raises:
        BadFileError, NotReadError: an object cannot be read.
    """
    names = {*SETTINGS, *(name for its in record.settings.values() for name in its if name.startswith(STATE))}
    saved = {(p, name): its[name] for p, its in record.settings.items() for name in its.keys() & names}
    found = settings(path, index)
    parameters = {parameter for parameter, _ in found}
    # A lost step, or number among the states, is a difference: the run starts over.
    lost = {p for p in saved if p not in found and p[0] in parameters and (p[1] == "step" or p[1].startswith(STATE))}
    unread = {place for place in saved if place in found and not _is_plain(found[place])}
    absent = saved.keys() - found.keys() - lost
    differ = [
        (*place, _both(found.get(place), value))
        for place, value in sorted(saved.items())
        if place not in absent | unread and not same(value, found.get(place))
    ]
    not_verified = {
        **_counted(absent, ABSENT),
        **_counted(unread, NO_NUMBER),
        **_counted(
            (p for p in found.keys() - saved.keys() if p[0] in record.settings and p[1] not in SETTINGS),
            "the run recorded nothing of it",
        ),
    }
    return Checked(0, _each_once(differ), not_verified, settings=len(saved) - len(absent) - len(unread) - len(differ))


def settings(path: Path, index: Index) -> dict[Place, Any]:
    """The settings of the parameters, their steps and the numbers among their states; an unreadable one is no number.

    Raises:
        BadFileError, NotReadError: an object cannot be read.
    """
    optimizers = [own for own in dcp.optimizers(index.tensors, index.objects) if not own.is_numbered]
    found: dict[Place, Any] = {}
    owners = Counter(parameter for own in optimizers for parameter in own.states)
    with RangedFiles() as files:
        for own in optimizers:
            for (parameter, name), value in _of_optimizer(own, index, partial(_value, files, path, index)):
                several = f"{own.prefix}{parameter}" if owners[parameter] > 1 else parameter
                place = several, name
                found[place] = object() if place in found else value  # of two groups it is unknown which one counts
    return found


def _of_optimizer(own: dcp.Optimizer, index: Index, value: Any) -> Iterator[tuple[Place, Any]]:
    read = {key: {s: name for s, name in its.items() if s in READ} for key, its in own.groups.items()}
    values = {name: value(name) for names in read.values() for name in names.values()}
    for names in read.values():  # the first element of a list that was stored one by one is not the list
        values.update({name: object() for s, name in names.items() if s and not name.endswith(f".{s}")})
    for number, group in enumerate(dcp.groups(replace(own, groups=read), values)):
        params = group.get("params")
        named = params if isinstance(params, list | tuple) and params else [f"{EMPTY_GROUP}{number}"]
        for parameter in named:
            yield from (((str(parameter), s), _plain(group[s])) for s in SETTINGS if s in group)
    for parameter, states in own.states.items():
        for state, name in states.items():
            if state == "step" or name not in index.tensors:
                setting = state if state == "step" else f"{STATE}{state}"
                yield (parameter, setting), _plain(value(name))


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a string, None, or a list of these."""
    every = value if isinstance(value, list) else [value]
    return all(type(one) in dcp.SCALARS for one in every)


def _plain(value: Any) -> Any:
    value = list(value) if isinstance(value, tuple) else value
    return whole(value) if isinstance(value, float) else value


def _value(files: RangedFiles, path: Path, index: Index, name: str) -> Any:
    """An object, or the number in a tensor of one element."""
    if name in index.objects:
        return torch_dist.read_place(files, path, index.objects[name]).value
    tensor = index.tensors[name]
    chunks = [offsets for offsets in tensor.chunks if offsets in tensor.places]
    if len(chunks) != 1 or prod(tensor.size) != 1:
        return object()
    read = torch_dist.read_chunk(files, path, tensor, chunks[0])
    number = torch_file.number(read.value.dtype, torch_file.data_of(read.path, read.value))
    return object() if number is None else number


def _counted(places: Iterable[Place], why: str) -> dict[str, str]:
    """The reason by setting, with the number of its parameters."""
    counts = sorted(Counter(name for _, name in places).items())
    return {f"{name} of {count} parameter{'s' if count > 1 else ''}": why for name, count in counts}


def _both(found: Any, saved: Any) -> str:
    return f"{'none' if found is None else shown(found)} in the files, {shown(saved)} in the run"


def _each_once(rows: Iterable[tuple[str, str, str]]) -> list[Difference]:
    """Differences from parameter, setting and text; one for all parameters that differ alike."""
    alike: dict[Place, list[str]] = defaultdict(list)
    for parameter, setting, what in rows:
        alike[setting, what].append(parameter)
    return [
        Difference(
            parameters[0], setting, SETTING, what + (f" ({len(parameters)} parameters)" if len(parameters) > 1 else "")
        )
        for (setting, what), parameters in alike.items()
    ]
