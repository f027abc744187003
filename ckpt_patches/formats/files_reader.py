"""Reader for files of safetensors and torch.save that no index joins, as trainers write them beside each other.

Transformers, Accelerate, peft, diffusers, weights alone, and local checkpoints of nvidia-resiliency-ext. Each file is
read on its own, and each optimizer in it by the names of its states. Names state which files belong to a save.
"""

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt_patches.errors import UserError
from ckpt_patches.formats import damages, safetensors, tensor_streams, torch_optimizers, trainer_files
from ckpt_patches.formats.checkpoint import ALONE, WEIGHT, Checkpoint, Extent, Shard, Stream
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.dcp_reader import set_step
from ckpt_patches.formats.dtypes import FLOATS
from ckpt_patches.formats.paths import path_within
from ckpt_patches.formats.safetensors import SUFFIX, Tensor
from ckpt_patches.formats.tensor_streams import read_json
from ckpt_patches.formats.torch_file import TensorHeader, TorchFile, tensors_in
from ckpt_patches.runtime.shown import shown

WITH_OPTIMIZER, WEIGHTS_ALONE = "safetensors and a torch optimizer", f"safetensors{ALONE}"
OF_TORCH = "files of torch.save, of a model and a torch optimizer"
BESIDE = "files of a trainer, beside a checkpoint"
LOCAL = "local checkpoint of nvidia-resiliency-ext"
OPTIMIZER = re.compile(r"optimizer(_\d+)?\.(bin|pt)")
INDEX = re.compile(r".+\.(safetensors|bin)\.index\.json")
WEIGHTS = re.compile(r"(pytorch_model|adapter_model|diffusion_pytorch_model).*\.bin")
ONE_OF = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.safetensors|\.bin)")
OF_A_RANK = re.compile(r"iter_(\d{7,15})_(\d{1,7})_local\.pt")  # a file of a local checkpoint, in its rank's folder
OWN = re.compile(r"(?!rng_state|optimizer|scheduler|scaler).+\.(pt|pth)")
PARAMETER = re.compile(r"(.*[._])?(weight|bias|lora_\w+)")  # in the name of what is no buffer
NORM = re.compile(r".*(norm|ln_|\bln)[^.]*\.weight", re.IGNORECASE)
INDEX_SUFFIX = ".index.json"
FILE = re.compile(r"[^/\0]+\.(safetensors|bin)")  # that an index can list
LEAST = 64  # bytes: fewer zeros can end a tensor that nothing was lost of
Files = dict[str, dict[str, Tensor]]  # tensors by file and name


def is_files(path: Path) -> bool:
    """Whether a folder has weights, or an optimizer beside files of a trainer."""
    names = [entry.name for entry in path.iterdir()]
    if any(name.endswith(SUFFIX) or INDEX.fullmatch(name) or WEIGHTS.fullmatch(name) for name in names):
        return True
    stems = {own["stem"] for own in map(trainer_files.NUMBERED.fullmatch, names) if own}
    is_of_a_trainer = trainer_files.STATE in names or stems & {*trainer_files.OF_RANKS}
    has_more = stems & {"optimizer", "scheduler"} or any(map(trainer_files.BELOW.fullmatch, names))
    return bool(is_of_a_trainer and has_more)


def is_local(path: Path) -> bool:
    """Whether a folder has a local checkpoint, or folders of ranks with one."""
    return any(map(OF_A_RANK.fullmatch, (Path(name).name for name in _local_names(path))))


def _local_names(path: Path) -> Iterator[str]:
    """The names of files in a folder, and in the folders of ranks in it, which have numbers for names."""
    for own in sorted(path.iterdir()):
        if OF_A_RANK.fullmatch(own.name):
            yield own.name
        elif own.name.isdecimal() and own.is_dir() and not own.is_symlink():
            with contextlib.suppress(OSError):  # another one's folder, which cannot be listed
                yield from (f"{own.name}/{inner.name}" for inner in sorted(own.iterdir()))


def read(path: Path) -> Checkpoint:
    """The structure of a checkpoint, with findings for the problems of its files."""
    found = Checkpoint(path, WEIGHTS_ALONE)
    names = sorted(own.name for own in path.iterdir())
    files = _read_safetensors(found, [name for name in names if name.endswith(SUFFIX)])
    torchs = {name: file for name in names if (file := _read_torch(found, name)) is not None}
    weights: dict[str, Any] = {n: dict(tensors_in(file.value)) for n, file in torchs.items() if WEIGHTS.fullmatch(n)}
    weights |= files
    found.findings += [one for name, tensors in weights.items() for one in _without_elements(name, tensors)]
    indexed = {name: _index(found, name) for name in names if INDEX.fullmatch(name)}
    found.findings += [one for name, listed in indexed.items() for one in _of_index(name, listed, weights, names)]
    found.findings += _of_numbers(names, {file for listed in indexed.values() for file in listed.values()})
    steps = _read_optimizers(found, torchs, weights)
    set_step(found, steps, path.name)
    found.findings += trainer_files.findings(path, names, steps, found.groups)
    found.format = _format(names)
    if not any(_has_weights(path / name) for name in names):
        found.add(damages.MISSING_WEIGHT, "model", "no file of the model's weights")
    return found


def _has_weights(path: Path) -> bool:
    """Whether a file or folder has weights, by its name or those in it: diffusers and peft have folders of models."""
    if path.name.endswith(SUFFIX) or any(
        own.fullmatch(path.name) for own in (WEIGHTS, INDEX, trainer_files.BELOW, OWN)
    ):
        return True
    inner = [own.name for own in path.iterdir()] if path.is_dir() else []
    return any(name.endswith(SUFFIX) or WEIGHTS.fullmatch(name) for name in inner)


def _format(names: Iterable[str]) -> str:
    has_optimizer = any(map(OPTIMIZER.fullmatch, names))
    if any(name.endswith((SUFFIX, f"{SUFFIX}{INDEX_SUFFIX}")) for name in names):
        return WITH_OPTIMIZER if has_optimizer else WEIGHTS_ALONE
    is_alone = any(map(WEIGHTS.fullmatch, names))
    return OF_TORCH if has_optimizer else f"files of torch.save{ALONE}" if is_alone else BESIDE


# Files of torch.save


def _read_torch(found: Checkpoint, name: str) -> TorchFile | None:
    """The content of a file, if its name or its first bytes are those of torch.save."""
    path = found.path / name
    is_named = trainer_files.NUMBERED.fullmatch(name) or WEIGHTS.fullmatch(name)
    is_torchs = is_named or (not path.is_dir() and tensor_streams.is_torchs(path))
    return tensor_streams.read_file(path, found) if is_torchs else None


def _read_optimizers(found: Checkpoint, files: Mapping[str, TorchFile], weights: Mapping[str, Any]) -> list[Any]:
    """Read the optimizers' files, with states by parameter number or name. Returns the steps of the states."""
    steps: list[Any] = []
    optimizers: list[dict[str, Any]] = []
    shapes = [tensor.shape for tensors in weights.values() for tensor in tensors.values()]
    for name, file in files.items():
        if not OPTIMIZER.fullmatch(name):
            continue
        value = file.value if isinstance(file.value, dict) else {}
        if not isinstance(value.get("state"), dict) or not isinstance(value.get("param_groups"), list):
            found.add(damages.MISSING_STATE, name, torch_optimizers.NO_STATES)
            continue
        optimizers.append(value)
        steps += torch_optimizers.take(found, file, value, f"{file.path.stem}.state").values()
        states = filter(_is_of_its_shape, tensor_streams.states_of(value).values())
        found.findings += torch_optimizers.without_weights(name, states, shapes) if shapes else ()
    return [0] if trainer_files.is_unstepped(optimizers) else steps


def _is_of_its_shape(state: Mapping[Any, Any]) -> bool:
    """Whether a parameter's states have its shape, as far as they tell; some are of rows, or of chosen elements."""
    tensors = [own for own in state.values() if isinstance(own, TensorHeader) and own.numel > 1]
    return len({tensor.shape for tensor in tensors}) == 1 and all(
        isinstance(own, TensorHeader) and own.numel > 1
        for name in torch_optimizers.OF_ELEMENTS
        if (own := state.get(name)) is not None
    )


# Local checkpoints


def read_local(path: Path) -> Checkpoint:
    """The newest iteration of a local checkpoint. A node has a folder for each of its ranks, and copies of others'."""
    found = Checkpoint(path, LOCAL)
    every = {name: own for name in _local_names(found.path) if (own := OF_A_RANK.fullmatch(Path(name).name))}
    found.iteration = max(int(own[1]) for own in every.values())
    newest = {name: own for name, own in every.items() if int(own[1]) == found.iteration}
    steps: list[Any] = []
    for name in every:
        file = tensor_streams.read_file(found.path / name, found)
        if name not in newest:
            found.add(damages.UNUSUAL, name, f"of an earlier iteration than {found.iteration}, which the others are of")
        elif file is not None:
            label = f"rank {int(newest[name][2])}"
            optimizers = list(torch_optimizers.within(file.value))
            for number, (optimizer, masters) in enumerate(optimizers):
                states = f"{name}.{number}.state" if len(optimizers) > 1 else f"{name}.state"
                steps += torch_optimizers.take(found, file, optimizer, states, label, masters=masters).values()
    set_step(found, steps)
    there = {int(own[2]) for own in newest.values()}
    folders = {int(parent) for name in every if (parent := Path(name).parent.name).isdecimal()}
    for rank in sorted({*folders, *range(min(there), min(max(there), min(there) + len(there)) + 1)} - there):
        found.add(damages.MISSING_RANK, f"rank {rank}", f"no file of iteration {found.iteration}")
    return found


# safetensors


def _read_safetensors(found: Checkpoint, names: list[str]) -> Files:
    files: Files = {}
    for name in names:
        try:
            path = path_within(found.path, name)
            files[name] = safetensors.read(path)
            found.findings += _zeros(name, files[name], safetensors.zeros_from(path, files[name]))
        except (UserError, OSError) as error:
            found.findings.append(tensor_streams.refused(error, name))
    for file, tensors in files.items():
        for name, tensor in tensors.items():
            if tensor.nbytes and tensor_streams.is_read(found, name, tensor.dtype):
                extent = Extent(str(found.path / file), tensor.offset, tensor.nbytes)
                found.shards.append(Shard(name, "", tensor.shape, {WEIGHT: Stream(name, tensor.dtype, (extent,))}))
    return files


def _without_elements(file: str, tensors: Mapping[str, Tensor | TensorHeader]) -> Iterator[Finding]:
    """Weights without elements. ZeRO-3 leaves `[0]` in place of a weight that is not gathered; no module has such."""
    empty = [name for name, tensor in tensors.items() if tuple(tensor.shape) == (0,) and tensor.dtype in FLOATS]
    if not any(math.prod(tensor.shape) for tensor in tensors.values()):
        yield Finding(damages.MISSING_WEIGHT, file, f"{len(tensors)} tensors, and no element of a weight")
    elif named := list(filter(PARAMETER.fullmatch, empty)):
        yield Finding(damages.MISSING_WEIGHT, file, f"{len(empty)} weights have the shape (0,), as {shown(named[0])}")


def _zeros(file: str, tensors: Mapping[str, Tensor], begin: int) -> Iterator[Finding]:
    """Zeros up to the end of a file, as of a copy that ended early in a file of its full size."""
    size = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=0)
    zero = {name: tensor for name, tensor in tensors.items() if tensor.nbytes and tensor.offset >= begin}
    is_cut = any(own.offset < begin and begin + LEAST <= own.offset + own.nbytes for own in tensors.values())
    has_matrix = any(len(tensor.shape) > 1 for tensor in zero.values())
    if not zero or not (is_cut or (has_matrix and len(zero) > 1)):
        return
    is_lost = has_matrix and (is_cut or any(map(NORM.fullmatch, zero)))
    first = min(zero, key=lambda name: zero[name].offset)
    detail = f"its last {size - begin} bytes are zeros: {len(zero)} whole tensors, from {shown(first)} on"
    yield Finding(damages.BAD_FILE if is_lost else damages.UNUSUAL, file, detail)


def _index(found: Checkpoint, name: str) -> dict[str, str]:
    """The file of each tensor, by an index; empty, with a finding, if it lists something other than files beside it."""
    content = read_json(found.path, name)
    if isinstance(content, Finding):
        found.findings.append(content)
        return {}
    listed = content.get("weight_map")
    if isinstance(listed, dict) and listed and all(isinstance(o, str) and FILE.fullmatch(o) for o in listed.values()):
        return listed
    found.add(damages.BAD_METADATA, name, "it has no weight_map of tensors to files beside it")
    return {}


def _of_index(index: str, listed: Mapping[str, str], files: Files, names: list[str]) -> Iterator[Finding]:
    """Check that an index lists the files and tensors that are present."""
    own = {*listed.values()}
    for file in sorted(own - {*names}):
        yield Finding(damages.BAD_FILE, file, f"the file is missing, and {index} lists it")
    places = {name: file for file in files for name in files[file]}
    for name, file in listed.items():
        if file in files and name not in files[file]:
            kind = damages.CONTRADICTION if name in places else damages.MISSING_WEIGHT
            yield Finding(kind, name, f"{index} has it in {file}, it is in {places.get(name, 'no file')}")
    unlisted = [name for file in sorted(own & files.keys()) for name in files[file] if name not in listed]
    if unlisted:
        yield Finding(damages.UNUSUAL, index, f"{len(unlisted)} tensors are not in it, such as {shown(unlisted[0])}")
    if listed and index.removesuffix(INDEX_SUFFIX) in names:
        yield Finding(damages.UNUSUAL, index, "a file of all weights and an index are there: a load takes one of them")


def _of_numbers(names: list[str], listed: set[str]) -> Iterator[Finding]:
    """Check that an index, which is written last, lists all files numbered as `-00001-of-00002`."""
    numbered = [own for own in map(ONE_OF.fullmatch, names) if own]
    for (prefix, count, suffix), there in sorted(Counter((own[1], own[3], own[4]) for own in numbered).items()):
        files = {f"{prefix}-{number:05d}-of-{count}{suffix}" for number in range(1, min(int(count), 99_999) + 1)}
        if not files & listed:
            yield Finding(damages.UNUSUAL, f"{prefix}-*-of-{count}{suffix}", f"{there} files that no index lists")
        elif unlisted := sorted((files & {*names}) - listed):
            yield Finding(damages.UNUSUAL, unlisted[0], "a file that the index does not list")
