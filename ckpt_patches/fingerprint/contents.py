"""What a checkpoint's files have: fingerprints, what has none, and the comparison with the record of its run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_patches.errors import UserError
from ckpt_patches.fingerprint import buckets, comparison, dcp_files, files, record_files
from ckpt_patches.fingerprint.boxes import Box
from ckpt_patches.fingerprint.comparison import Checked
from ckpt_patches.fingerprint.record import NotARecord, from_plain
from ckpt_patches.fingerprint.states import Fingerprint
from ckpt_patches.formats import megatron_torch, torch_dist, torch_file
from ckpt_patches.formats.checkpoint import Checkpoint, Stream
from ckpt_patches.formats.dcp import is_dcp
from ckpt_patches.formats.megatron_names import is_bucket
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.recorded import KEY
from ckpt_patches.runtime.distributed import Ranks

NO_PLACES = "a bucket, and where parameters begin in it is not in the checkpoint (CKPT_PATCHES_FINGERPRINT=1 saves it)"


class Contents(NamedTuple):
    """The states in a checkpoint's files."""

    fingerprints: list[Fingerprint]
    unread: dict[str, str]  # what has no fingerprint, and the reason
    checked: Checked | None = None  # the comparison with what the run recorded; None if it did not
    buckets: files.Hashes | None = None  # of arrays without a fingerprint: those of a copy are equal


def of_zero(path: Path, found: list[Fingerprint], unread: dict[str, str]) -> Contents:
    """The contents of a ZeRO checkpoint, whose fingerprints are those that a conversion would give.

    Raises:
        UserError: the model states cannot be read.
    """
    plain = record_files.of_deepspeed(path)
    return Contents(found, unread, None if plain is None else comparison.with_record(plain, found, unread))


def of(
    found: Checkpoint, workers: int = 1, ranks: Ranks | None = None, *, quiet: bool = False, with_buckets: bool = False
) -> Contents:
    """The contents of a checkpoint in any other format.

    Args:
        found: its structure.
        workers: number of processes that read.
        ranks: of the command; each calls this, and reads its share.
        quiet: whether to show no progress line.
        with_buckets: whether to read buckets without places, too.

    Raises:
        UserError: a file cannot be read; or the `torch` format without a record.
    """
    if found.format == "megatron torch":
        return _of_torch(found)
    if found.format == "deepspeed without zero":
        raise UserError(f"{found.path}: the states of DeepSpeed without ZeRO have numbers in place of names")
    ranks = ranks or Ranks()
    own, label = files.tensors(found), "" if quiet else found.path.name
    if found.format == "deepspeed universal":
        parts = {name: its for name, its in own.parts.items() if name.endswith(".pt")}  # the others are weights
        hashed = files.hashes(parts, workers, label, ranks)
        return of_zero(found.path, _named(hashed, files.of_universal), own.unread)
    hashed = files.hashes(own.parts, workers, label, ranks)
    if is_dcp(found.path):
        return _of_dcp(found.path, hashed, own.unread)
    if found.format.startswith("megatron"):
        return _of_megatron(found, hashed, own.unread, with_buckets=with_buckets)
    return Contents(_named(hashed, lambda name: (name, "model")), own.unread)


def _named(hashed: files.Hashes, names: files.Names) -> list[Fingerprint]:
    return [Fingerprint(*names(name), *hashed[name]) for name in sorted(hashed)]


def _of_dcp(path: Path, hashed: files.Hashes, unread: dict[str, str]) -> Contents:
    index = dcp_files.read(path)
    named = dcp_files.names(index)
    left = {name: named[name] for name in named if name not in hashed}
    why = {
        parameter if state == "model" else f"{parameter} {state}": unread.get(name, dcp_files.UNREAD)
        for name, (parameter, state) in left.items()
    }
    return Contents(dcp_files.fingerprints(index, hashed), why, dcp_files.check(path, index, hashed))


def _of_megatron(found: Checkpoint, hashed: files.Hashes, unread: dict[str, str], *, with_buckets: bool) -> Contents:
    fingerprints = _named(hashed, files.of_megatron)
    in_buckets = list(of_buckets(found.recorded, buckets.in_distributed(found)))
    if (found.path / torch_dist.INDEX).exists():
        read = torch_dist.read_index(found.path).tensors.keys() - hashed.keys()
        unread = {name: unread.get(name, dcp_files.UNREAD) for name in read if not is_bucket(name)}
    arrays = {} if in_buckets else {flat.stream.array: flat.stream for flat in buckets.in_distributed(found)}
    left = {its.array for shard in found.shards if not shard.has_rows for its in shard.streams.values()}
    unread |= {} if in_buckets else dict.fromkeys(sorted(left), NO_PLACES)
    fingerprints += in_buckets
    recorded = found.recorded
    checked = None if recorded is None else comparison.with_record(recorded, fingerprints, unread)
    with RangedFiles() as opened:
        whole = {name: files.of_parts([_in_a_row(own)], opened) for name, own in arrays.items() if with_buckets}
    return Contents(fingerprints, unread, checked, whole)


def _in_a_row(stream: Stream) -> files.Part:
    return files.Part(Box((0,), (stream.numel,), (stream.numel,)), stream)


def of_buckets(plain: Any, flats: Iterator[buckets.Flat]) -> Iterator[Fingerprint]:
    """The fingerprints of the parameters in buckets, at the offsets from the record; none if it has no offsets.

    Raises:
        UserError: a file cannot be read.
    """
    try:
        known = buckets.layouts(from_plain(plain).buckets) if plain is not None else {}
    except NotARecord:
        return  # the comparison reports it
    if known:
        yield from buckets.fingerprints(known, flats)


def _of_torch(found: Checkpoint) -> Contents:
    """The `torch` format: each optimizer of a model-parallel rank has its own record, and names in the rank's folder.

    Raises:
        UserError: a file cannot be read, or no rank has a record.
    """
    fingerprints: list[Fingerprint] = []
    checked: list[Checked] = []
    for folder in megatron_torch.folders(found.path):
        value = torch_file.read(folder / megatron_torch.OPTIMIZER, trust=True).value  # runs no code
        name = "" if folder == found.path else folder.name
        for number, one in enumerate(value if isinstance(value, list) else [value]):
            optimizer = number if isinstance(value, list) and len(value) > 1 else None
            plain = one.get(KEY) if isinstance(one, dict) else None
            if plain is None:
                continue
            label = f"{name}/" * bool(name) + (f"{optimizer}/" if optimizer is not None else "")
            own = list(of_buckets(plain, buckets.in_torch(found, name, number if isinstance(value, list) else None)))
            fingerprints += [its._replace(parameter=f"{label}{its.parameter}") for its in own]
            checked.append(_labeled(comparison.with_record(plain, own), label))
    if not checked:
        raise UserError(
            f"{found.path}: expected a record of the run in the `torch` format (CKPT_PATCHES_FINGERPRINT=1), found "
            "none, and the files themselves do not state where parameters begin in the buffers"
        )
    return Contents(fingerprints, {}, comparison.together(checked))


def _labeled(own: Checked, label: str) -> Checked:
    """Ranks have equal names of parameters."""
    differences = [one._replace(parameter=f"{label}{one.parameter}") for one in own.differences]
    return own._replace(
        differences=differences, not_verified={f"{label}{what}": why for what, why in own.not_verified.items()}
    )
