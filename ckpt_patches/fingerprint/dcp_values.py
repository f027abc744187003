"""The settings and buffers in checkpoints of torch.distributed.checkpoint: compared with a record, or another one.

Needs no torch.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckpt_patches.fingerprint.offline import Checked
from ckpt_patches.fingerprint.record import SETTINGS, STATE, Record, Settings, same, setting_differences, whole
from ckpt_patches.fingerprint.states import Difference, bits_of, blocks, buffer_digest
from ckpt_patches.fingerprint.verdict import BUFFER
from ckpt_patches.formats import dcp, torch_dist, torch_file
from ckpt_patches.formats.dtypes import FLOATS
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.torch_dist import Index, NotContiguousError, Tensor
from ckpt_patches.runtime.shown import shown

READ = (*SETTINGS, "params", "")  # of the param groups; "" is one object with all of them
ABSENT = "not in the files under this name"
UNREAD = object()  # a value that is no number
# A numbered parameter's group and place in it. A load takes the states in the order of the places.
PLACE = "place in the param groups"


IN_16_BITS = ("bfloat16", "float16")
Data = Callable[[], Iterator[memoryview]]  # reads a tensor in blocks


class NotExactError(Exception):
    """A type of 16 bits does not represent an element."""


class OfParameter(NamedTuple):
    """The settings of a parameter in the files, its step and the numbers among its states."""

    settings: Settings
    unread: frozenset[str]  # names of those that are no numbers, or not the only ones


@dataclass(frozen=True)
class Values:
    """What a checkpoint has besides states of floats."""

    settings: Mapping[str, OfParameter]
    others: Mapping[str, str | None]  # digests of the other tensors, by name; None if stored in several parts


def of_files(path: Path, index: Index) -> Values:
    """All settings and other tensors of a checkpoint, to compare them with another checkpoint's.

    Raises:
        BadFileError, NotReadError: an object or a tensor cannot be read.
    """
    every = dcp.optimizers(index.tensors, index.objects)
    of_states = {name for own in every for its in own.states.values() for name in _numbers(index, its).values()}
    others = [one for name, one in sorted(index.tensors.items()) if name not in of_states and one.dtype not in FLOATS]
    with RangedFiles() as files:
        read = [(tensor, _data(files, path, tensor)) for tensor in others]
        digests = {t.name: None if data is None else next(_digests(t, data)) for t, data in read}
    return Values(settings(path, index, everything=True), digests)


def settings(path: Path, index: Index, *, everything: bool = False) -> dict[str, OfParameter]:
    """The settings by parameter; with the optimizer's prefix if several optimizers have a parameter of that name.

    Args:
        path: the checkpoint's folder.
        index: of the checkpoint, or of a part of it.
        everything: whether to read settings that no record has, and optimizers that number their parameters.

    Raises:
        BadFileError, NotReadError: an object cannot be read.
    """
    optimizers = [own for own in dcp.optimizers(index.tensors, index.objects) if everything or not own.is_numbered]
    with RangedFiles() as files:
        value = partial(_value, files, path, index)
        rows = [(own.prefix, *row) for own in optimizers for row in _of_optimizer(own, index, value, everything)]
    owners = Counter(parameter for _, parameter in {(prefix, parameter) for prefix, parameter, _ in rows})
    found: dict[str, OfParameter] = {}
    for prefix, parameter, its in rows:
        name = parameter if owners[parameter] == 1 else f"{prefix}{parameter}"
        if name in found:  # of a parameter in two groups it is not known which of them counts
            its = OfParameter({}, frozenset().union(*found[name], *its))
        found[name] = its
    return found


def _of_optimizer(
    own: dcp.Optimizer, index: Index, value: Callable[[str], Any], everything: bool
) -> Iterator[tuple[str, OfParameter]]:
    read = {key: {s: name for s, name in its.items() if everything or s in READ} for key, its in own.groups.items()}
    values = {name: value(name) for names in read.values() for name in names.values()}
    for names in read.values():  # the first element of a list that was stored one by one is not the list
        values.update({name: UNREAD for s, name in names.items() if s and not name.endswith(f".{s}")})
    left = dict(own.states)
    for number, group in enumerate(dcp.groups(replace(own, groups=read), values)):
        params = group.pop("params", None)
        known = group if everything else {name: group[name] for name in SETTINGS if name in group}
        for place, parameter in enumerate(params if isinstance(params, list | tuple) else ()):
            if type(parameter) in (int, str):
                states = left.pop(str(parameter), {})
                of_place = {PLACE: [number, place]} if everything and isinstance(parameter, int) else {}
                numbers = {state: value(name) for state, name in _numbers(index, states).items()}
                yield str(parameter), _of_parameter({**known, **of_place}, numbers)
    for parameter, states in left.items():  # no group names it
        yield parameter, _of_parameter({}, {state: value(name) for state, name in _numbers(index, states).items()})


def _numbers(index: Index, states: Mapping[str, str]) -> dict[str, str]:
    """The step of a parameter and those of its states that are no tensors of floats but single numbers."""

    def is_number(name: str) -> bool:
        tensor = index.tensors.get(name)
        return tensor is None or (tensor.dtype not in FLOATS and prod(tensor.size) == 1)

    return {state: name for state, name in states.items() if state == "step" or is_number(name)}


def _of_parameter(group: Mapping[str, Any], states: Mapping[str, Any]) -> OfParameter:
    found = dict(group)
    found |= {name if name == "step" else f"{STATE}{name}": one for name, one in states.items()}
    known = {name: list(one) if isinstance(one, tuple) else one for name, one in found.items() if _is_plain(one)}
    if isinstance(step := known.get("step"), float):
        known["step"] = whole(step)
    return OfParameter(known, frozenset(found.keys() - known.keys()))


def _value(files: RangedFiles, path: Path, index: Index, name: str) -> Any:
    """An object, or the number in a tensor of one element; `UNREAD` for another tensor."""
    if name in index.objects:
        return torch_dist.read_place(files, path, index.objects[name]).value
    tensor = index.tensors[name]
    chunks = [offsets for offsets in tensor.chunks if offsets in tensor.places]
    if len(chunks) != 1 or prod(tensor.size) != 1:
        return UNREAD
    read = torch_dist.read_chunk(files, path, tensor, chunks[0])
    number = torch_file.number(tensor.dtype, torch_file.data_of(read.path, read.value))
    return UNREAD if number is None else number


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a string, None, or a list of these."""
    every = value if isinstance(value, list | tuple) else [value]
    return all(type(one) in dcp.SCALARS for one in every)


def check(path: Path, index: Index, record: Record, of_model: str | None) -> Checked:
    """Compare the settings and buffers in the files with the record.

    Args:
        path: the checkpoint's folder.
        index: of the part that the record is of.
        record: of the run.
        of_model: the prefix of the model's tensors; None if unknown.

    Raises:
        BadFileError, NotReadError: an object or a buffer cannot be read.
    """
    of_settings, of_buffers = _settings(record, settings(path, index)), _buffers(path, index, record, of_model)
    return Checked(
        0,
        of_settings.differences + of_buffers.differences,
        {**of_settings.unchecked, **of_buffers.unchecked},
        values=of_settings.values + of_buffers.values,
    )


def _settings(record: Record, found: Mapping[str, OfParameter]) -> Checked:
    names = {*SETTINGS, *(name for its in record.settings.values() for name in its if name.startswith(STATE))}
    saved = {(parameter, name) for parameter, its in record.settings.items() for name in its.keys() & names}
    unread = {(p, name) for p, name in saved if p in found and name in found[p].unread}
    absent = {(p, name) for p, name in saved - unread if p not in found or name not in found[p].settings}
    every = {parameter: its.settings for parameter, its in found.items()}
    differ = [
        (one.parameter, one.setting, _both(one.found, one.saved, "the files", "the run"))
        for one in setting_differences(record.settings, every, sorted(names))
        if (one.parameter, one.setting) not in unread
        if one.found is not None or one.setting == "step" or one.setting.startswith(STATE)
    ]
    absent -= {(parameter, name) for parameter, name, _ in differ}
    new = {(p, name) for p in record.settings.keys() & found.keys() for name in _of_states(found[p])} - saved
    unchecked = {
        **_counted(absent, ABSENT),
        **_counted(unread, "no number in the files, or in several param groups"),
        **_counted(new - unread, "the run recorded nothing of it"),
    }
    return Checked(0, _each_once(differ), unchecked, values=len(saved - absent - unread))


def _of_states(its: OfParameter) -> set[str]:
    return {name for name in its.settings.keys() | its.unread if name == "step" or name.startswith(STATE)}


def _counted(places: Iterable[tuple[str, str]], why: str) -> dict[str, str]:
    """The reason by setting, with the number of its parameters."""
    counts = sorted(Counter(name for _, name in places).items())
    return {f"{name} of {count} parameter{'s' if count > 1 else ''}": why for name, count in counts}


def _both(one: Any, other: Any, place: str, place_of_other: str) -> str:
    """Two different values and their places; None is absent."""
    of_both = [(one, place), (other, place_of_other)]
    return ", ".join(f"none in {at}" if value is None else f"{shown(value)} in {at}" for value, at in of_both)


def _each_once(rows: Iterable[tuple[str, str, str]]) -> list[Difference]:
    """Differences from parameter, setting and text; one for all parameters that differ alike."""
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for parameter, setting, what in rows:
        alike[setting, what].append(parameter)
    return [
        Difference(parameters[0], setting, what + (f" ({len(parameters)} parameters)" if len(parameters) > 1 else ""))
        for (setting, what), parameters in alike.items()
    ]


def compared(one: Values, other: Values) -> Checked:
    """Compare the settings and other tensors of two checkpoints."""
    rows: list[tuple[str, str, str]] = []
    places = ("the first one", "the second one")
    count, unread = 0, set[tuple[str, str]]()
    nothing = OfParameter({}, frozenset())
    for parameter in sorted(one.settings.keys() | other.settings.keys()):
        first, second = one.settings.get(parameter, nothing), other.settings.get(parameter, nothing)
        for name in sorted({*first.settings, *second.settings, *first.unread, *second.unread}):
            values = first.settings.get(name), second.settings.get(name)
            if name in first.unread | second.unread:
                unread.add((parameter, name))
                continue
            count += 1
            if not same(*values):
                rows.append((parameter, name, _both(*values, *places)))
    for name in sorted(one.others.keys() & other.others.keys()):
        digests = one.others[name], other.others[name]
        if None in digests:
            unread.add((name, "elements"))
        elif digests[0] != digests[1]:
            rows.append((name, "elements", "other values"))
    for name in sorted(one.others.keys() ^ other.others.keys()):
        rows.append((name, "elements", f"in {places[name not in one.others]} alone"))
    return Checked(
        0, _each_once(rows), _counted(unread, "no number, or in several parts or param groups"), values=count
    )


def _buffers(path: Path, index: Index, record: Record, of_model: str | None) -> Checked:
    count, differences, unchecked = 0, list[Difference](), dict[str, str]()
    with RangedFiles() as files:
        for what, its in record.others.items():
            name = what.removeprefix(BUFFER)
            tensor = index.tensors.get(f"{of_model}{name}") if of_model is not None else None
            data = None if tensor is None else _data(files, path, tensor)
            if tensor is None or data is None:
                unchecked[what] = ABSENT if tensor is None else "it is stored in several parts, or not in order"
                continue
            count += 1
            if not any(its.get("value") == digest for digest in _digests(tensor, data)):
                differences.append(Difference(name, BUFFER.strip(), "other values"))
    return Checked(0, differences, unchecked, values=count)


def _data(files: RangedFiles, path: Path, tensor: Tensor) -> Data | None:
    """A function that reads a tensor in blocks; None if it is not stored in one part and in order."""
    if list(tensor.chunks.values()) != [tensor.size] or not tensor.places:
        return None
    try:
        read = torch_dist.read_chunk(files, path, tensor, next(iter(tensor.chunks)))
    except NotContiguousError:
        return None
    return partial(blocks, files, read.path, read.value.offset, read.value.nbytes)


def _digests(tensor: Tensor, data: Data) -> Iterator[str]:
    """The digests that a run can have recorded of a buffer, as stored first; each reads it again.

    FSDP1 can keep buffers in 16 bits and save them in 32, which is exact.
    """
    yield buffer_digest(tensor.dtype, tensor.size, data())
    if tensor.dtype == "float32":
        for dtype in IN_16_BITS:
            with contextlib.suppress(NotExactError):
                yield buffer_digest(dtype, tensor.size, (_in_16_bits(block, dtype) for block in data()))


def _in_16_bits(block: memoryview, dtype: str) -> memoryview:
    """The elements in a smaller type.

    Raises:
        NotExactError: the type cannot represent one of them.
    """
    bits = np.frombuffer(block, "<u4")
    with np.errstate(over="ignore"):
        half = np.frombuffer(block, "<f4").astype("<f2")
    small = half.view("<u2") if dtype == "float16" else (bits >> np.uint32(16)).astype("<u2")
    found = memoryview(small).cast("B")
    if not np.array_equal(bits_of(found, dtype), bits):
        raise NotExactError
    return found
