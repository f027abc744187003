"""The fingerprints of checkpoints that training scripts write with torch.distributed.checkpoint. Needs no torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt_patches.fingerprint import megatron_files
from ckpt_patches.fingerprint.record import KEY, from_text
from ckpt_patches.fingerprint.states import FLOATS, MASTERS_OF_TORCH, Fingerprint
from ckpt_patches.formats import dcp, torch_dist
from ckpt_patches.formats.ranged import RangedFiles

Names = dict[str, tuple[str, str]]  # by a tensor's name in the index: its parameter and state


def is_dcp(path: Path) -> bool:
    """Whether a folder is such a checkpoint, and not one of megatron-core."""
    folders = dcp.folders(path)
    return bool(folders) and not (folders == [path] and dcp.is_by_megatron_core(path))


def read(path: Path) -> torch_dist.Index:
    """The index of a checkpoint; reads no elements.

    Raises:
        UserError: an index is missing, damaged or of an unsupported kind, or no file has an entry's bytes.
    """
    index = dcp.merged(path, [(folder, torch_dist.read_index(folder)) for folder in dcp.folders(path)])
    megatron_files.check_entries(path, index)
    return index


def recorded(path: Path, index: torch_dist.Index) -> Any:
    """The record of the run that saved, or None.

    Raises:
        BadFileError, NotReadError: the record's entry cannot be read.
    """
    name = next((name for name in index.objects if name.rpartition(".")[2] == KEY), None)
    if name is None:
        return None
    with RangedFiles() as files:
        return from_text(torch_dist.read_place(files, path, index.objects[name]).value)


def fingerprints(path: Path, index: torch_dist.Index) -> Iterator[Fingerprint]:
    """The fingerprints of all tensors of floats, except steps.

    Raises:
        UserError: the checkpoint is damaged, or a chunk is missing.
    """
    named = names(index)
    with RangedFiles() as files:
        for name, tensor in sorted(index.tensors.items()):
            if name in named:
                yield Fingerprint(*named[name], *megatron_files.of_torch_dist(files, path, tensor))


def left_out(index: torch_dist.Index) -> dict[str, str]:
    """The names of tensors without a fingerprint, and the reasons; steps are settings."""
    optimizers = dcp.optimizers(index.tensors, index.objects)
    steps = {states.get("step") for own in optimizers for states in own.states.values()}
    rest = {name: tensor.dtype for name, tensor in sorted(index.tensors.items()) if name not in steps}
    expected = ", ".join(FLOATS)
    return {name: f"elements of {dtype}, expected {expected}" for name, dtype in rest.items() if dtype not in FLOATS}


def names(index: torch_dist.Index) -> Names:
    """The parameter and state of each tensor of floats; "model" if it is not an optimizer's."""
    found: Names = {}
    for own in dcp.optimizers(index.tensors, index.objects):
        for parameter, states in own.states.items():
            has_main = any(states.get(name) in index.tensors for name in MASTERS_OF_TORCH)
            if parameter in own.weights:
                found[own.weights[parameter]] = parameter, "weight" if has_main else "master"
            for state, name in states.items():
                found[name] = parameter, "master" if state in MASTERS_OF_TORCH else state
        of_model = next(iter({w.removesuffix(p) for p, w in own.weights.items()}), None)
        for name in index.tensors.keys() - found.keys() if of_model is not None else ():
            if name.startswith(of_model or ""):
                found[name] = name.removeprefix(of_model or ""), "model"
    floats = {name for name, tensor in index.tensors.items() if tensor.dtype in FLOATS}
    rest = {name: (name, "model") for name in floats}
    return {name: place for name, place in {**rest, **found}.items() if name in floats and place[1] != "step"}
