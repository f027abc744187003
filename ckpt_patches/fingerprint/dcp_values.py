"""The settings and buffers in checkpoints of torch.distributed.checkpoint, compared with a record. Needs no torch."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_patches.fingerprint.offline import Checked
from ckpt_patches.fingerprint.record import SETTINGS, STATE, Record, Settings, setting_differences
from ckpt_patches.fingerprint.states import Difference, blocks, buffer_digest
from ckpt_patches.fingerprint.verdict import BUFFER
from ckpt_patches.formats import dcp, torch_dist, torch_file
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.settings import is_step
from ckpt_patches.formats.torch_dist import Index, Tensor
from ckpt_patches.runtime.shown import shown

READ = (*SETTINGS, "params", "")  # of the param groups; "" is one object with all of them
ABSENT = "not in the files"


def settings(path: Path, index: Index) -> dict[str, Settings]:
    """Each parameter's settings, its step and the numbers among its states. Numbered parameters are left out.

    Raises:
        BadFileError, NotReadError: an object cannot be read.
    """
    optimizers = [own for own in dcp.optimizers(index.tensors, index.objects) if not own.is_numbered]
    counts = Counter(parameter for own in optimizers for parameter in own.states)
    found: dict[str, Settings] = {}
    with RangedFiles() as files:
        for own in optimizers:
            for parameter, its in _of_optimizer(own, partial(_value, files, path, index)):
                found[parameter if counts[parameter] < 2 else f"{own.prefix}{parameter}"] = its
    return found


def _of_optimizer(own: dcp.Optimizer, value: Callable[[str], Any]) -> Iterator[tuple[str, Settings]]:
    groups = {key: {s: name for s, name in names.items() if s in READ} for key, names in own.groups.items()}
    values = {name: value(name) for names in groups.values() for name in names.values()}
    for group in dcp.groups(replace(own, groups=groups), values):
        params = group.get("params")
        for parameter in params if isinstance(params, list | tuple) else ():
            if isinstance(parameter, str):
                states = {name: value(where) for name, where in own.states.get(parameter, {}).items()}
                yield parameter, _of_parameter(group, states)


def _of_parameter(group: Mapping[str, Any], states: Mapping[str, Any]) -> Settings:
    found = {name: group[name] for name in SETTINGS if name in group}
    found |= {name if name == "step" else f"{STATE}{name}": one for name, one in states.items() if one is not None}
    if is_step(found.get("step")):
        found["step"] = int(found["step"])
    return {name: list(one) if isinstance(one, tuple) else one for name, one in found.items() if _is_plain(one)}


def _value(files: RangedFiles, path: Path, index: Index, name: str) -> Any:
    """An object, or the number in a tensor of one element; None for another tensor."""
    if name in index.objects:
        return torch_dist.read_place(files, path, index.objects[name]).value
    tensor = index.tensors[name]
    chunks = [offsets for offsets in tensor.chunks if offsets in tensor.places]
    if len(chunks) != 1 or tensor.size not in ((), (1,)):
        return None
    read = torch_dist.read_chunk(files, path, tensor, chunks[0])
    return torch_file.number(tensor.dtype, torch_file.data_of(read.path, read.value))


def _is_plain(value: Any) -> bool:
    return all(type(one) in (bool, int, float, str) for one in (value if isinstance(value, list | tuple) else [value]))


def check(path: Path, index: Index, record: Record) -> Checked:
    """Compare the settings and buffers in the files with the record. Raises as `settings`."""
    of_settings, of_buffers = _settings(record, settings(path, index)), _buffers(path, index, record)
    return Checked(
        0,
        of_settings.differences + of_buffers.differences,
        {**of_settings.unchecked, **of_buffers.unchecked},
        values=of_settings.values + of_buffers.values,
    )


def _settings(record: Record, found: Mapping[str, Settings]) -> Checked:
    names = {*SETTINGS, *(name for its in record.settings.values() for name in its if name.startswith(STATE))}
    differ = setting_differences(record.settings, found, sorted(names))
    differences = _each_once(
        (one.parameter, one.setting, one.found, one.saved, "the files", "the run") for one in differ
    )
    saved = {(parameter, name) for parameter, its in record.settings.items() for name in its.keys() & names}
    absent = {(p, name) for p, name in saved if name not in found.get(p, {})}
    counts = Counter(name for _, name in absent - {(one.parameter, one.setting) for one in differ})
    unchecked = {f"{name} of {n} parameter{'s' if n > 1 else ''}": ABSENT for name, n in sorted(counts.items())}
    return Checked(0, differences, unchecked, values=len(saved - absent))


def differences(one: Mapping[str, Settings], other: Mapping[str, Settings]) -> list[Difference]:
    """The settings of common parameters that differ between two checkpoints."""
    return _each_once(
        (parameter, name, one[parameter].get(name), other[parameter].get(name), "the first one", "the second one")
        for parameter in sorted(one.keys() & other.keys())
        for name in sorted(one[parameter].keys() | other[parameter].keys())
        if one[parameter].get(name) != other[parameter].get(name)
    )


def _each_once(rows: Iterable[tuple[str, str, Any, Any, str, str]]) -> list[Difference]:
    """Differences from (parameter, setting, two values and their places); one for all parameters that differ alike."""
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for parameter, setting, value, other, place, place_of_other in rows:
        of_both = [(value, place), (other, place_of_other)]
        what = [f"not in {at}" if one is None else f"{shown(one)} in {at}" for one, at in of_both]
        alike[setting, ", ".join(what)].append(parameter)
    return [
        Difference(parameters[0], setting, what + (f" ({len(parameters)} parameters)" if len(parameters) > 1 else ""))
        for (setting, what), parameters in alike.items()
    ]


def _buffers(path: Path, index: Index, record: Record) -> Checked:
    prefix = dcp.weights_prefix(index.tensors, index.objects, {parameter for parameter, _ in record.states})
    count, differences, unchecked = 0, list[Difference](), dict[str, str]()
    with RangedFiles() as files:
        for what, its in record.others.items():
            name = what.removeprefix(BUFFER)
            tensor = index.tensors.get(f"{prefix}{name}") if prefix is not None else None
            found = None if tensor is None else _digest(files, path, tensor)
            if found is None:
                unchecked[what] = ABSENT if tensor is None else "it is stored in several parts"
                continue
            count += 1
            if found != its.get("value"):
                differences.append(Difference(name, BUFFER.strip(), "other values"))
    return Checked(0, differences, unchecked, values=count)


def _digest(files: RangedFiles, path: Path, tensor: Tensor) -> str | None:
    """The digest of a buffer; None if it is stored in several parts."""
    if list(tensor.chunks.values()) != [tensor.size] or not tensor.places:
        return None
    read = torch_dist.read_chunk(files, path, tensor, next(iter(tensor.chunks)))
    return buffer_digest(tensor.dtype, tensor.size, blocks(files, read.path, read.value.offset, read.value.nbytes))
