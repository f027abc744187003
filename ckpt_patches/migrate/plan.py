"""Plan a migration before any byte is written: what the new checkpoint has, and where its bytes lie in the old one."""

import operator
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_patches.errors import UserError
from ckpt_patches.formats import megatron_arrays, torch_dist_reader, torch_file, zarr
from ckpt_patches.formats.checkpoint import Checkpoint, Extent
from ckpt_patches.formats.chunked import Chunked, Object
from ckpt_patches.formats.damages import BAD_FILE, BAD_METADATA, NOT_READ
from ckpt_patches.formats.megatron_arrays import STATES, param_groups, sharding_types
from ckpt_patches.formats.reading import wrong_path
from ckpt_patches.formats.torch_dist import COMMON, COMMON_OBJECT, INDEX, Offsets, Tensor
from ckpt_patches.formats.torch_file import Instance
from ckpt_patches.migrate import output
from ckpt_patches.migrate.output import Entry, OutputFile

EXPECTED = "one of Megatron's distributed checkpoints, in zarr or torch_dist"
# Megatron's names for the sharding types of the distributed optimizer's state, and the new type of each old one.
MODEL_SPACE, BUCKETS, GATHERED = "fully_sharded_model_space", "fully_sharded_bucket_space", "dp_zero_gather_scatter"
RESHARDABLE = "fully_reshardable"
TARGETS = {MODEL_SPACE: RESHARDABLE, GATHERED: GATHERED}
TYPE, GROUPS, CONTENT = "param_state_sharding_type", "param_groups", "content_metadata"
TYPE_OF_CONTENT = "distrib_optim_sharding_type"
# An optimizer's array: the state and the parameter. Up to 0.13 chained optimizers, as of experts, have a prefix.
OF_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:state\.([^.]+)\.(.+))?", re.DOTALL)
SHARD = re.compile(r".+/shard_(\d[\d.]*)(?:_(\d[\d.]*))?", re.DOTALL)  # an object: its index, and the counts
OTHER_WAY = "load it in megatron-core 0.15.3 with the fixes and save it as dp_reshardable"

Shape = tuple[int, ...]


class Part(NamedTuple):
    """A chunk of a new tensor, and the byte ranges of its elements, in order."""

    offsets: Offsets
    shape: Shape
    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class Source:
    """The checkpoint to migrate."""

    found: Checkpoint
    arrays: dict[str, Chunked]
    objects: dict[str, Object]  # by name
    common: Object  # the unsharded state
    kind: str  # Megatron's sharding type of the optimizer state; empty if it is missing or not distributed
    files: tuple[tuple[str, int, int], ...]  # see `files_in`

    @property
    def is_zarr(self) -> bool:
        """Whether objects are not in a list of one, as in torch_dist."""
        return self.found.format.endswith(megatron_arrays.ZARR)

    @property
    def needs_nothing(self) -> bool:
        """Whether megatron-core 0.16 and later load it as it is."""
        if self.is_zarr or self.kind not in TARGETS:
            return not self.is_zarr
        content = self.common.value.get(CONTENT)
        return self.kind == GATHERED and isinstance(content, dict) and content.get(TYPE_OF_CONTENT) == GATHERED


@dataclass(frozen=True)
class Plan:
    """The plan of a migration."""

    source: Source
    target_type: str  # Megatron's sharding type of the new optimizer state
    tensors: tuple[Tensor, ...]  # without places
    files: tuple[OutputFile, ...]
    warnings: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """The total size of the files."""
        return sum(file.nbytes for file in self.files)


def read(path: Path, *, trust: bool = False) -> Source:
    """The structure of a checkpoint.

    Raises:
        UserError: it is not a distributed Megatron checkpoint, is damaged, of a kind that is not migrated, or names
            classes that are not listed.
    """
    backend = megatron_arrays.backend(path) if path.is_dir() else None
    if backend is None:
        raise wrong_path(path, EXPECTED)
    if backend not in megatron_arrays.BACKENDS:
        raise UserError(f"{path}: expected {EXPECTED}, found one in {backend}")
    files, is_zarr = files_in(path), backend == megatron_arrays.ZARR
    found, arrays, objects = (zarr if is_zarr else torch_dist_reader).read_chunked(path)
    for finding in found.findings:
        is_damaged = finding.kind is BAD_METADATA and finding.array not in (megatron_arrays.CONFIG, COMMON)
        is_dropped = is_zarr and finding.kind in (BAD_FILE, NOT_READ)  # else its array or object would be left out
        if is_damaged or is_dropped or (finding.kind is NOT_READ and finding.array == INDEX):
            raise UserError(f"{path}: {finding.array} cannot be read, and nothing was written: {finding.detail}")
    if is_zarr:  # these are written anew, and not as the bytes that they are
        objects = {name: _object(own.extent.path, trust) for name, own in objects.items()}
    held = objects.pop(COMMON_OBJECT, None)
    if held is None or (path / COMMON).exists():
        common = _object(path / COMMON, trust)
    else:
        common = Object(held.extent, held.value[0] if isinstance(held.value, list) and held.value else None)
    if not isinstance(common.value, dict):
        raise UserError(f"{path / COMMON}: expected a dict, found {type(common.value).__name__}")
    kinds = sharding_types(common.value)
    if len(set(kinds)) > 1:
        raise UserError(f"{path}: expected one sharding type of the optimizer, found {sorted(set(kinds))}")
    of_arrays = MODEL_SPACE if any(array.tensor.whole is not None for array in arrays.values()) else ""
    kind = kinds[0] if kinds else of_arrays
    if kind == BUCKETS:
        raise UserError(
            f"{path}: expected an optimizer's state in {' or '.join(TARGETS)}, found {kind}: load it in the release "
            f"that saved it, save it as {MODEL_SPACE} (--ckpt-fully-parallel-save), and migrate that"
        )
    return Source(found, arrays, objects, common, kind, files)


def _object(path: str | Path, trust: bool) -> Object:
    file = torch_file.read(Path(path), trust=trust)
    return Object(Extent(str(file.path), 0, file.size), file.value)


def files_in(path: Path) -> tuple[tuple[str, int, int], ...]:
    """All files of a checkpoint: name, bytes, modification time in ns, which differs for a rewritten file."""
    found = []
    for folder, _, names in os.walk(path):
        for name in names:
            status = os.stat(os.path.join(folder, name))
            found.append((os.path.relpath(os.path.join(folder, name), path), status.st_size, status.st_mtime_ns))
    return tuple(sorted(found))


def plan(source: Source) -> Plan:
    """Plan a migration.

    Raises:
        UserError: elements are missing, a key is unknown, or the groups have different steps.
    """
    target = TARGETS.get(source.kind, source.kind)
    _check_steps(source.common.value)
    arrays, objects = list(_arrays(source)), list(_objects(source, target))
    entries = [output.of_tensor(new, *part) for new, parts in arrays for part in parts]
    common = _renewed(source.common.value, target)
    if target:
        common[CONTENT] = _described(common.get(CONTENT), target)
    file = OutputFile(COMMON, (output.of_value(COMMON, common, source.common.extent.path),))
    files = (*output.in_files([*entries, *objects]), file)
    return Plan(source, target, tuple(new for new, _ in arrays), files, tuple(_warnings(source)))


# Tensors


def _arrays(source: Source) -> Iterator[tuple[Tensor, list[Part]]]:
    """The new tensors and their parts.

    Raises:
        UserError: a state of the optimizer is not known, two arrays would have one name, or elements are missing.
    """
    path, names = source.found.path, dict[str, str]()
    for name, array in source.arrays.items():
        own = OF_OPTIMIZER.match(name)
        new, model = name, own[2] if own else None
        if own and source.kind == MODEL_SPACE:
            if own[1] not in STATES:
                raise UserError(
                    f"{path}: {name} is not a known state of the optimizer, and nothing was written: a checkpoint "
                    "without it would not be complete"
                )
            new = f"optimizer.state.{own[1].removeprefix('fp32_')}.{model}"
        if names.setdefault(new, name) != name:
            raise UserError(f"{path}: several arrays would become {new}, one of them {name}")
        _check_complete(array, source.found)
        parts = _parts(source, array, model)
        yield Tensor(new, array.tensor.dtype, array.full, None, {part.offsets: part.shape for part in parts}), parts


def _check_complete(array: Chunked, found: Checkpoint) -> None:
    """Check that the chunks of an array hold each element exactly once.

    Raises:
        UserError: they do not. The message has the reason why a chunk cannot be read, with the file's name.
    """
    name = array.tensor.name
    for at in array.tensor.chunks:
        if at not in array.extents:
            failed = (own for own in found.findings if own.kind in (BAD_FILE, NOT_READ))
            reasons = [own.detail for own in failed if own.array == name and own.shard in ("", str(at))]
            problem = f"cannot be read: {reasons[0]}" if reasons else "is not there, or not all of it"
            raise UserError(f"{name}: its chunk at {list(at)} {problem}")
    if why := array.untiled():
        raise UserError(f"{name}: {why}")


def _parts(source: Source, array: Chunked, model: str | None) -> list[Part]:
    """The parts of a new tensor, one for each shard of a tensor-parallel rank. It is a state of the parameter `model`.

    Raises:
        UserError: a state does not have its parameter's shape, or its shards are uneven.
    """
    path, name = source.found.path, array.tensor.name
    if model is None:
        return _shards(array)
    if model not in source.arrays:
        raise UserError(f"{path}: {name} is the state of {model}, which is not there")
    if (shape := source.arrays[model].full) != array.full:
        raise UserError(f"{path}: expected {name} of its parameter's shape {list(shape)}, found {list(array.full)}")
    if array.tensor.whole is None and len(array.full) == 1:  # slices of a bias's state
        return [Part((0,), array.full, tuple(array.extents[at] for at in sorted(array.extents)))]
    return _shards(array)


def _shards(array: Chunked) -> list[Part]:
    parts = []
    for offsets in array.shards().values():
        shape, tensor = array.shape(offsets), array.tensor
        if tensor.whole is not None and tuple(map(operator.mul, shape, tensor.size)) != tensor.whole:
            raise UserError(
                f"{tensor.name}: expected {list(tensor.size[:-1])} even parts of {list(tensor.whole)}, found parts of "
                f"{tensor.size[-1]} elements"
            )
        parts.append(Part(array.begin(offsets) or offsets[0], shape, tuple(array.extents[at] for at in offsets)))
    return parts


# Objects and the unsharded state


def _objects(source: Source, target: str) -> Iterator[Entry]:
    """The objects, unchanged if possible. Outside model space, each rank's param groups are an object.

    Raises:
        UserError: the groups of one have different steps, or a name lacks a count, as before 0.12.
    """
    for key, own in source.objects.items():
        if (named := SHARD.fullmatch(key)) and named[1].count(".") != (named[2] or "").count("."):
            raise UserError(
                f"{source.found.path}: expected an object's index and count on each axis, as megatron-core 0.12 and "
                f"later name it, found {key}: {OTHER_WAY}"
            )
        _check_steps(own.value)
        is_changed = _without_step(own.value) > 0
        value = _renewed(own.value, target) if is_changed else own.value
        if source.is_zarr or is_changed:
            yield output.of_value(key, [value] if source.is_zarr else value, own.extent.path)
        else:
            yield output.unchanged(key, own.extent)


def _steps(value: Any) -> list[list[Any]]:
    """The step of each param group, None where it has none, by optimizer."""
    return [[group.get("step") for group in groups] for groups in param_groups(value)]


def _check_steps(value: Any) -> None:
    """Check that all param groups have the same step.

    Raises:
        UserError: the steps differ, so that megatron-core would refuse to load the checkpoint.
    """
    found = {step for steps in _steps(value) for step in steps if isinstance(step, int | float)}
    if len(found) > 1:
        numbers = ", ".join(sorted(map(str, found)))
        raise UserError(
            f"expected one step in all parameter groups, found {numbers}: megatron-core would refuse to load it; take "
            "another checkpoint"
        )


def _without_step(value: Any) -> int:
    """The number of param groups without a step, beside others of their optimizer that have one."""
    return sum(steps.count(None) for steps in _steps(value) if steps.count(None) < len(steps))


def _renewed(value: Any, target: str) -> Any:
    """A copy with another sharding type.

    A group without a step gets that of the others: Megatron steps all groups of an optimizer together.
    """
    if isinstance(value, list):
        return [_renewed(inner, target) for inner in value]
    if type(value) is not dict:
        return value
    made = {key: _renewed(inner, target) for key, inner in value.items()}
    if isinstance(made.get(TYPE), str):
        made[TYPE] = target
    groups = made.get(GROUPS)
    if isinstance(groups, list) and _without_step({GROUPS: groups}):
        step = next(own["step"] for own in groups if isinstance(own, dict) and own.get("step") is not None)
        lacking = [isinstance(own, dict) and own.get("step") is None for own in groups]
        made[GROUPS] = [{**own, "step": step} if lacks else own for own, lacks in zip(groups, lacking, strict=True)]
    return made


def _described(before: Any, target: str) -> dict[str, Any]:
    """The metadata that Megatron-LM reads first: how the optimizer state is sharded and named."""
    content = {
        "singleton_local_shards": False,
        **(before if isinstance(before, dict) else {}),
        TYPE_OF_CONTENT: target,
        "chained_optim_avoid_prefix": True,
    }
    if target == RESHARDABLE:
        content["distrib_optim_fully_reshardable_mem_efficient"] = False
    return content


def _warnings(source: Source) -> Iterator[str]:
    common = source.common.value
    content, arguments = common.get(CONTENT), common.get("args")
    is_later = isinstance(content, dict) and content.keys() - {TYPE_OF_CONTENT}
    stages = arguments.fields.get("pipeline_model_parallel_size") if isinstance(arguments, Instance) else None
    if source.kind == MODEL_SPACE and not is_later and stages != 1:
        yield (
            "the optimizer's parameter groups (learning rates, weight decay) are those of rank 0 alone, as releases up "
            "to 0.13.1 save them: where other pipeline ranks had other ones, set them anew"
        )
    if lacking := sum(map(_without_step, (common, *(own.value for own in source.objects.values())))):
        yield (
            f"{lacking} of the optimizer's parameter groups have no step, and get that of the others: releases up to "
            "0.13.1 leave it out where a group has no parameters on the saving rank (empty_group_step)"
        )
