"""Reader for a model in safetensors, with the torch optimizer that Accelerate and Transformers save next to it."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt_patches.formats import damages, optimizer_inventory, safetensors, tensor_streams
from ckpt_patches.formats.checkpoint import (
    ALONE,
    MOMENTS,
    VOCABULARY,
    WEIGHT,
    Checkpoint,
    Extent,
    Shard,
    Stream,
)
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.dcp_reader import read_others, set_step
from ckpt_patches.formats.safetensors import INDEX_SUFFIX, SUFFIX, Tensor
from ckpt_patches.formats.torch_file import TorchFile
from ckpt_patches.runtime.shown import shown

WITH_OPTIMIZER, WEIGHTS_ALONE = "safetensors and a torch optimizer", f"safetensors{ALONE}"
OF_TORCH = "files of torch.save, of a model and a torch optimizer"
OPTIMIZER = re.compile(r"optimizer(_\d+)?\.(bin|pt)")
SCHEDULER = re.compile(r"scheduler(_\d+)?\.(bin|pt)")
INDEX = re.compile(r".+\.(safetensors|bin)\.index\.json")
# Next to an optimizer's file, these identify a folder of Accelerate or of Transformers' Trainer.
OF_A_TRAINER = re.compile(r"random_states_\d+\.pkl|trainer_state\.json")
WEIGHTS = re.compile(r"(pytorch_model|adapter_model|diffusion_pytorch_model).*\.bin|pytorch_model_fsdp_\d+")
ONE_OF = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
Files = dict[str, dict[str, Tensor]]  # tensors by file and name


def is_safetensors(path: Path) -> bool:
    names = [entry.name for entry in path.iterdir()]
    if any(name.endswith(SUFFIX) or INDEX.fullmatch(name) for name in names):
        return True
    return any(map(OPTIMIZER.fullmatch, names)) and any(map(OF_A_TRAINER.fullmatch, names))


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint, with findings for the problems of its files."""
    found = Checkpoint(path, WEIGHTS_ALONE)
    names = sorted(entry.name for entry in path.iterdir())
    files = _read_files(found, [name for name in names if name.endswith(SUFFIX)])
    indexed = {name: _index(found, name) for name in names if INDEX.fullmatch(name)}
    for name, listed in indexed.items():
        found.findings += _of_index(name, listed, files, names)
    found.findings += _of_numbers(names, {file for listed in indexed.values() for file in listed.values()})
    for file, tensors in files.items():
        for name, tensor in tensors.items():
            found.shards += _shard(found, path / file, name, tensor)
    weights = [tensor for tensors in files.values() for tensor in tensors.items()]
    steps = [step for name in names if OPTIMIZER.fullmatch(name) for step in _read_optimizer(found, name, weights)]
    set_step(found, steps, path.name)
    is_of_torch = not any(name.endswith(SUFFIX) for name in names)
    if is_of_torch:
        found.format = OF_TORCH
    if is_of_torch and not indexed and not any(map(WEIGHTS.fullmatch, names)):
        found.findings.append(Finding(damages.MISSING_WEIGHT, "model", detail="no file of the model's weights"))
    found.findings += _of_schedulers(names)
    read_others(found)
    return found


def _of_schedulers(names: list[str]) -> Iterator[Finding]:
    """Report a scheduler's file without an optimizer's. Transformers with DeepSpeed saves that in a subfolder."""
    schedulers = [own for own in map(SCHEDULER.fullmatch, names) if own]
    is_below = any(name.startswith("global_step") for name in names)
    if schedulers and not is_below and not any(map(OPTIMIZER.fullmatch, names)):
        kind = damages.MISSING_STATE if schedulers[0][2] == "bin" else damages.UNUSUAL
        yield Finding(kind, "optimizer", detail=f"{schedulers[0][0]} is there, and no file of an optimizer")


def _read_files(found: Checkpoint, names: list[str]) -> Files:
    files: Files = {}
    for name in names:
        try:
            files[name] = safetensors.read(found.path / name)
        except safetensors.BadHeaderError as error:
            found.findings.append(Finding(damages.BAD_FILE, name, detail=str(error)))
        except OSError as error:
            found.findings.append(Finding(damages.BAD_FILE, name, detail=error.strerror or str(error)))
    return files


def _index(found: Checkpoint, name: str) -> dict[str, str]:
    try:
        return safetensors.read_index(found.path / name)
    except safetensors.BadIndexError as error:
        found.findings.append(Finding(damages.BAD_METADATA, name, detail=str(error)))
        return {}


def _of_index(index: str, listed: Mapping[str, str], files: Files, names: list[str]) -> Iterator[Finding]:
    """Check that an index lists the files and tensors that are present."""
    own = {*listed.values()}
    for file in sorted(own - {*names}):
        yield Finding(damages.BAD_FILE, file, detail=f"the file is missing, and {index} lists it")
    places = {name: file for file in files for name in files[file]}
    for name, file in listed.items():
        if file in files and name not in files[file]:
            there = f", it is in {places[name]}" if name in places else ""
            kind = damages.CONTRADICTION if there else damages.MISSING_WEIGHT
            yield Finding(kind, name, detail=f"{index} has it in {file}{there}")
    unlisted = [name for file in sorted(own & files.keys()) for name in files[file] if name not in listed]
    if unlisted:
        detail = f"{len(unlisted)} tensors are in its files and not in the index, such as {shown(unlisted[0])}"
        yield Finding(damages.UNUSUAL, index, detail=detail)
    if listed and index.removesuffix(INDEX_SUFFIX) in names:
        detail = "a file of all weights and an index are there: a load takes one of them"
        yield Finding(damages.UNUSUAL, index, detail=detail)


def _of_numbers(names: list[str], listed: set[str]) -> Iterator[Finding]:
    """Check that an index, which is written last, lists all files numbered as `-00001-of-00002`."""
    numbered = [own for own in map(ONE_OF.fullmatch, names) if own]
    for (prefix, count), there in sorted(Counter((own[1], own[3]) for own in numbered).items()):
        files = {f"{prefix}-{number:05d}-of-{count}{SUFFIX}" for number in range(1, min(int(count), 99_999) + 1)}
        if not files & listed:
            detail = f"no index lists them, and they are {there} of {int(count)}"
            yield Finding(damages.UNUSUAL, f"{prefix}-*-of-{count}{SUFFIX}", detail=detail)
        elif unlisted := sorted((files & {*names}) - listed):
            yield Finding(damages.UNUSUAL, unlisted[0], detail="a file that the index does not list")


def _shard(found: Checkpoint, path: Path, name: str, tensor: Tensor) -> Iterator[Shard]:
    if tensor.nbytes and tensor_streams.is_read(found, name, tensor.dtype):
        extent = Extent(str(path), tensor.offset, tensor.nbytes)
        yield Shard(name, "", tensor.shape, {WEIGHT: Stream(name, tensor.dtype, (extent,))})


def _read_optimizer(found: Checkpoint, name: str, weights: list[tuple[str, Tensor]]) -> list[Any]:
    """Read an optimizer's state dict, keyed by parameter number or name. Returns the steps that it states."""
    found.format = WITH_OPTIMIZER
    file = tensor_streams.read_file(found.path / name, found)
    if file is None:
        return []
    value = file.value if isinstance(file.value, dict) else {}
    if not isinstance(value.get("state"), dict) or not isinstance(value.get("param_groups"), list):
        detail = "expected state and param_groups, as a torch optimizer's state dict has them"
        found.findings.append(Finding(damages.MISSING_STATE, name, detail=detail))
        return []
    groups, states = tensor_streams.groups_of(value), tensor_streams.states_of(value)
    steps = tensor_streams.steps_of(file.path, states)
    found.findings += tensor_streams.of_optimizer(file, groups, states, steps)
    if weights:
        shapes = (tensor.shape for _, tensor in weights)
        found.findings += tensor_streams.findings(optimizer_inventory.without_weights(name, states.values(), shapes))
    found.groups += groups
    tokens = {tensor.shape: called for called, tensor in weights if any(word in called for word in VOCABULARY)}
    for number, state in states.items():
        found.shards += _of_moments(found, file, number, state, tokens)
    return [*steps.values(), *(group.get("step") for group in groups)]


def _of_moments(
    found: Checkpoint, file: TorchFile, number: Any, state: Mapping[Any, Any], tokens: Mapping[tuple[int, ...], str]
) -> Iterator[Shard]:
    array = f"{file.path.stem}.state.{number!s:.100}"
    streams = tensor_streams.streams(found, file.path, array, {role: state.get(role) for role in MOMENTS})
    shapes = {state[role].shape for role in streams}
    if len(shapes) == 1 and all(stream.numel for stream in streams.values()):
        shape = shapes.pop()
        like = f" of the shape of {tokens[shape]}" if shape in tokens else ""
        yield Shard(f"{array}{like}", "", shape, streams)
