"""Read tensors of torch.save files as streams, for the readers of formats that consist of such files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_patches.errors import UserError
from ckpt_patches.formats import damages, torch_file
from ckpt_patches.formats.checkpoint import Checkpoint, Extent, Held, Record, Stream
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.dtypes import ITEM_SIZE, UnknownDtypeError
from ckpt_patches.formats.paths import LinkOutsideError, path_within
from ckpt_patches.formats.ranged import open_regular, read_metadata

OF_TORCH, OF_TORCH_OR_ANOTHER = (".pt", ".pth"), (".bin", ".pkl")  # suffixes
# Found in the names of quantized tensors (codes with scales), Transformer Engine's and torch's.
QUANTIZED = ("Float8", "FP8", "FP4", "_rebuild_qtensor")


def read(path: Path, found: Checkpoint, damage: damages.FindingKind = damages.BAD_FILE) -> Any:
    """The value of a file; None, and a finding, if it cannot be read. Registers its tensors and checksums."""
    file = read_file(path, found, damage)
    return None if file is None else file.value


def read_file(
    path: Path, found: Checkpoint, damage: damages.FindingKind = damages.BAD_FILE
) -> torch_file.TorchFile | None:
    """The same as `read`, but returns the file with its metadata."""
    found.read.add(path.name)
    try:
        if path.is_relative_to(found.path):
            path_within(found.path, str(path.relative_to(found.path)))
        file = torch_file.read(path, trust=True)  # executes nothing; unknown classes become stubs
    except (torch_file.BadFileError, torch_file.NotReadError, LinkOutsideError) as error:
        found.findings.append(refused(error, path.name, damage=damage))
        return None
    hold(found, file, (0, file.size))
    return file


def is_torchs(path: Path) -> bool:
    """Whether a file is one of torch.save, by its suffix or first bytes. What cannot be opened may be one."""
    if path.suffix not in OF_TORCH_OR_ANOTHER:
        return path.suffix in OF_TORCH
    try:
        with open(open_regular(path), "rb") as file:
            return file.read(4) == b"PK\3\4"
    except OSError:
        return True


def refused(
    error: UserError | OSError, array: str, shard: str = "", *, damage: damages.FindingKind = damages.BAD_FILE
) -> Finding:
    """A finding for what cannot be read: `damage`, or NOT_READ for an unknown format and a link to elsewhere."""
    is_unknown = isinstance(error, torch_file.NotReadError | UnknownDtypeError | LinkOutsideError)
    kind = damages.NOT_READ if is_unknown else damage
    detail = error.strerror if isinstance(error, OSError) else None
    return Finding(kind, array, detail or str(error), shard=shard)


def read_json(folder: Path, name: str) -> dict[str, Any] | Finding:
    """The object in a JSON file of a checkpoint; a finding if it cannot be read."""
    try:
        content = json.loads(read_metadata(path_within(folder, name)))
    except (UserError, OSError) as error:
        return refused(error, name, damage=damages.BAD_METADATA)
    except (ValueError, RecursionError):
        content = None
    return content if isinstance(content, dict) else Finding(damages.BAD_METADATA, name, "it is no JSON object")


def hold(found: Checkpoint, file: torch_file.TorchFile, span: tuple[int, int], name: str = "") -> None:
    """Register all tensors of a file, or of a part of one, and their checksums."""
    found.records += [Record(str(file.path), *stored, span) for stored in file.storages]
    for place, part in torch_file.parts_of(file.value, name):
        if isinstance(part, torch_file.TensorHeader):
            found.tensors.append(Held(str(file.path), place, part))
        elif any(word in type(part).__name__ for word in QUANTIZED):
            detail = (
                f"an object of {type(part).__module__}.{type(part).__name__}, whose bytes are no numbers by themselves"
            )
            found.add(damages.NOT_JUDGED, place, detail)


def stream(found: Checkpoint, path: Path, array: str, value: Any) -> Stream | None:
    """A complete tensor of a file; None if `value` is not a contiguous tensor, or if its dtype cannot be read.

    The latter adds a finding.
    """
    if not isinstance(value, torch_file.TensorHeader) or not value.is_contiguous:
        return None
    if not is_read(found, array, value.dtype):
        return None
    return Stream(array, value.dtype, (Extent(str(path), value.offset, value.nbytes),))


def streams(found: Checkpoint, path: Path, array: str, values: Mapping[str, Any]) -> dict[str, Stream]:
    """The complete tensors of a parameter, by role, as in `stream`. Other values are left out."""
    every = {role: stream(found, path, f"{array}.{role}", value) for role, value in values.items()}
    return {role: own for role, own in every.items() if own is not None}


def weight(found: Checkpoint, path: Path, name: str, value: Any, shape: tuple[int, ...]) -> Stream | None:
    """The model's weight of a parameter, as in `stream`. One of another shape is not compared and adds a finding."""
    if isinstance(value, torch_file.TensorHeader) and value.shape != shape:
        detail = f"the model's weight has the shape {value.shape}, its parameter {shape}: they were not compared"
        found.add(damages.NOT_JUDGED if value.numel else damages.MISSING_WEIGHT, name, detail)
        return None
    return stream(found, path, name, value)


def is_read(found: Checkpoint, array: str, dtype: str) -> bool:
    """Whether the elements of this dtype can be read; adds a finding if not."""
    if dtype not in ITEM_SIZE:
        found.add(damages.NOT_READ, array, f"elements of torch.{dtype}, a type that is not known here")
    return dtype in ITEM_SIZE


def groups_of(optimizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The param groups in a torch optimizer's state dict."""
    groups = optimizer.get("param_groups")
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def states_of(optimizer: Mapping[str, Any]) -> dict[Any, dict[Any, Any]]:
    """The states in a torch optimizer's state dict, by parameter."""
    states = optimizer.get("state")
    return {n: state for n, state in states.items() if isinstance(state, dict)} if isinstance(states, dict) else {}


def steps_of(path: Path, states: Mapping[Any, Mapping[Any, Any]]) -> dict[Any, float | None]:
    """The step of each parameter that has one; None if it is not a number."""
    return {number: scalar(path, state["step"]) for number, state in states.items() if "step" in state}


def scalar(path: Path, value: Any) -> float | None:
    """The value of a number, or of a tensor with one element; None for anything else."""
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, torch_file.TensorHeader) or value.numel != 1 or not value.is_known:
        return None
    return torch_file.number(value.dtype, torch_file.data_of(path, value))
