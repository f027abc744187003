"""Plan a complete migration before any byte is written. Pure."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_patches.errors import UserError
from ckpt_patches.formats.damages import BAD_FILE, NOT_READ
from ckpt_patches.formats.megatron_arrays import parameter_and_role
from ckpt_patches.formats.torch_dist import COMMON, Tensor
from ckpt_patches.formats.torch_dist_reader import Chunked
from ckpt_patches.migrate import keys, output, parts, settings
from ckpt_patches.migrate.keys import BUCKETS, GATHERED, MODEL_SPACE, TARGETS
from ckpt_patches.migrate.output import Entry, OutputFile
from ckpt_patches.migrate.parts import Part, Shape
from ckpt_patches.migrate.source import Source


@dataclass(frozen=True)
class Plan:
    """The plan of a migration."""

    source_type: str  # Megatron's sharding type of the optimizer state; empty if not distributed
    target_type: str
    tensors: tuple[Tensor, ...]  # without places
    files: tuple[OutputFile, ...]
    warnings: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """The total size of the files."""
        return sum(file.nbytes for file in self.files)


def source_type(source: Source) -> str:
    """The sharding type of the source's optimizer state; empty if the state is missing or not distributed.

    Raises:
        UserError: it has several types.
    """
    found = settings.sharding_types(source.common.value)
    if len(found) > 1:
        raise UserError(f"{source.found.path}: expected one sharding type of the optimizer, found {sorted(found)}")
    if found:
        return found.pop()
    return MODEL_SPACE if any(array.tensor.whole is not None for array in source.arrays.values()) else ""


def needs_nothing(source: Source) -> bool:
    """Whether megatron-core 0.16 and later load the source as it is."""
    if source.is_zarr or source.mixed:
        return False
    kind = source_type(source)
    return kind not in TARGETS or (kind == GATHERED and settings.is_described(source.common.value))


def plan(source: Source) -> Plan:
    """Plan a migration.

    Raises:
        UserError: elements are missing, a key is unknown, or the groups have different steps.
    """
    kind = source_type(source)
    target = TARGETS.get(kind, kind)
    settings.check_steps(source.common.value)
    arrays, objects = _arrays(source, kind), list(_objects(source, target))
    entries = [output.of_tensor(new, part) for new, own in arrays.values() for part in own]
    renewed = settings.renewed(source.common.value, target)
    common = settings.described(renewed, target) if target else renewed
    file = OutputFile(COMMON, (output.of_value(COMMON, common, source.common.extent.path),))
    return Plan(
        kind,
        target,
        tuple(new for new, _ in arrays.values()),
        (*output.in_files([*entries, *objects]), file),
        tuple(_warnings(source, kind)),
    )


def _warnings(source: Source, kind: str) -> Iterator[str]:
    if source.mixed:
        yield (
            f"rows of SwiGLU's W and V, which torch FSDP2 has mixed, are put in place in {len(source.mixed)} tensors: "
            "up to megatron-core 0.18 a run under FSDP2 loads them with the fix fsdp2_swiglu_rows only"
        )
    if kind == MODEL_SPACE and settings.are_of_rank_0(source.common.value):
        yield (
            "the optimizer's parameter groups (learning rates, weight decay) are those of rank 0 alone, as releases up "
            "to 0.13.1 save them: where other pipeline ranks had other ones, set them anew"
        )
    values = [source.common.value, *(own.value for own in source.objects.values())]
    if lacking := sum(map(settings.without_step, values)):
        yield (
            f"{lacking} of the optimizer's parameter groups have no step, and get that of the others: releases up to "
            "0.13.1 leave it out where a group has no parameters on the saving rank (empty_group_step)"
        )


def _arrays(source: Source, kind: str) -> dict[str, tuple[Tensor, list[Part]]]:
    """The new tensors and their parts, by the arrays' names."""
    path, unpadded = source.found.path, _unpadded(source) if kind == BUCKETS else {}
    reasons = {(own.array, own.shard): own.detail for own in source.found.findings if own.kind in (BAD_FILE, NOT_READ)}
    found, names = {}, set[str]()
    for name, array in source.arrays.items():
        bucket = parameter_and_role(name)[0]
        new = keys.in_model_space(name) if kind == MODEL_SPACE else name
        if new is None or (kind == BUCKETS and keys.is_of_optimizer(name) and bucket not in unpadded):
            raise UserError(
                f"{path}: {name} is not a known state of the optimizer, and nothing was written: a checkpoint without "
                "it would not be complete"
            )
        if new in names:
            raise UserError(f"{path}: several arrays would become {new}, one of them {name}")
        names.add(new)
        parts.check(array, reasons)
        if bucket in unpadded:
            own = [parts.without_padding(array, unpadded[bucket])]
            size = own[0].shape
        else:
            size, own = _parts(source, array, kind)
        chunks = {part.offsets: part.shape for part in own}
        found[name] = Tensor(new, array.tensor.dtype, size, None, chunks), own
    return found


def _parts(source: Source, array: Chunked, kind: str) -> tuple[Shape, list[Part]]:
    """The size and the parts of a new tensor.

    Raises:
        UserError: it cannot be determined whether rows are mixed, or a state does not have its parameter's shape.
    """
    path, name, model = source.found.path, array.tensor.name, keys.model_key(array.tensor.name)
    if model is not None and model not in source.arrays:
        raise UserError(f"{path}: {name} is the state of {model}, which is not there")
    weight = None if model is None else source.arrays[model].tensor
    if weight and kind == MODEL_SPACE:
        array = parts.with_full_shape(array, weight)
    size = array.tensor.size if array.tensor.whole is None else array.tensor.whole
    if name in source.mixed:
        grid, why_not = source.mixed[name]
        if grid is None:
            raise UserError(
                f"{path}: cannot tell whether rows of W and V are in place in {name}, and nothing was written: "
                f"{why_not}"
            )
        own = parts.with_rows_in_place(array, grid)
    else:
        is_line = weight is not None and array.tensor.whole is None and len(size) == 1  # slices of a bias's state
        own = [parts.joined(array)] if is_line else parts.of_array(array)
    if weight and weight.size != size:
        raise UserError(f"{path}: expected {name} of its parameter's shape {list(weight.size)}, found {list(size)}")
    return size, own


def _unpadded(source: Source) -> dict[str, int]:
    """The length of each bucket without padding, from the objects that state it.

    Raises:
        UserError: such an object has an unknown form.
    """
    found: dict[str, int] = {}
    for key, own in source.objects.items():
        group, _, what = key.rpartition("/")[0].rpartition(".")
        if what != "per_bucket_numel_unpadded":
            continue
        try:
            (value,) = [own.value] if source.is_zarr else own.value
            for number, buffer in enumerate(value):
                for dtypes, sizes in buffer.items():
                    named = ", ".join(f"{part.__module__}.{part.__name__}" for part in dtypes)
                    prefix = f"{group}.gbuf_idx_{number}.dtype_({named}).bucket_idx_"
                    found |= {f"{prefix}{bucket}": int(numel) for bucket, numel in enumerate(sizes)}
        except (TypeError, AttributeError, ValueError) as error:
            raise UserError(f"{key} does not record how long the buckets are: {error}") from None
    return found


def _objects(source: Source, target: str) -> Iterator[Entry]:
    """The objects, unchanged if possible. Outside model space, each rank's param groups are an object.

    Raises:
        UserError: two would have one name, or the groups of one have different steps.
    """
    names = keys.object_keys(list(source.objects))
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise UserError(f"{source.found.path}: several objects would become {twice[0]}")
    for key, own in source.objects.items():
        settings.check_steps(own.value)
        is_changed = settings.without_step(own.value) > 0
        value = settings.renewed(own.value, target) if is_changed else own.value
        if source.is_zarr or is_changed:
            yield output.of_value(names[key], [value] if source.is_zarr else value, own.extent.path)
        else:
            yield output.unchanged(names[key], own.extent)
