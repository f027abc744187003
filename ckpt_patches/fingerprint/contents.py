"""What a checkpoint's files have: fingerprints, what has none, and the comparison with the record of its run."""

from pathlib import Path
from typing import Any, NamedTuple

from ckpt_patches.errors import UserError
from ckpt_patches.fingerprint import buckets, comparison, dcp_files, files, record_files
from ckpt_patches.fingerprint.comparison import Verdict
from ckpt_patches.fingerprint.record import NotARecord, from_plain
from ckpt_patches.fingerprint.states import Fingerprint
from ckpt_patches.formats import torch_dist, zero_folder
from ckpt_patches.formats.checkpoint import Checkpoint
from ckpt_patches.formats.dcp import is_dcp
from ckpt_patches.formats.megatron_names import is_bucket
from ckpt_patches.runtime.distributed import Ranks

NUMBERED = ("megatron torch", "deepspeed without zero")  # formats


class Contents(NamedTuple):
    """The states in a checkpoint's files."""

    fingerprints: list[Fingerprint]
    unread: dict[str, str]  # what has no fingerprint, and the reason
    checked: Verdict | None = None  # the comparison with what the run recorded; None if it did not


def of_zero(path: Path, found: list[Fingerprint], unread: dict[str, str]) -> Contents:
    """The contents of a ZeRO checkpoint, whose fingerprints are those that a conversion would give.

    Raises:
        UserError: the model states cannot be read.
    """
    plain = record_files.of_deepspeed(path)
    return Contents(found, unread, None if plain is None else comparison.with_record(plain, found, unread))


def of(found: Checkpoint, workers: int = 1, ranks: Ranks | None = None, *, quiet: bool = False) -> Contents:
    """The contents of a checkpoint in any other format.

    Args:
        found: its structure.
        workers: number of processes that read.
        ranks: of the command; each calls this, and reads its share.
        quiet: whether to show no progress line.

    Raises:
        UserError: a file cannot be read; or the format has no names of parameters.
    """
    if found.format in NUMBERED:
        raise UserError(f"{found.path}: the states of {found.format} have numbers in place of names")
    parts, unread = files.tensors(found)
    known = _layouts(found.recorded)
    if found.format == "deepspeed universal":
        parts = {
            name: its
            for name, its in parts.items()
            if name.endswith(".pt") or name.startswith(zero_folder.FROZEN_PARTS)
        }
    parts = {**parts, **files.tensors_in_buckets(found, known)}
    hashed = files.hashes(parts, workers, "" if quiet else found.path.name, ranks or Ranks())
    if found.format == "deepspeed universal":
        return of_zero(found.path, _named(hashed, files.of_universal), unread)
    if is_dcp(found.path):
        return Contents(*dcp_files.read(found.path, hashed, unread))
    if not found.format.startswith("megatron"):
        return Contents(_named(hashed, lambda name: (name, "model")), unread)
    in_buckets = {its.array for shard in found.shards if not shard.has_rows for its in shard.streams.values()}
    if (found.path / torch_dist.INDEX).exists():
        tensors = torch_dist.read_index(found.path).tensors
        unread = {name: unread.get(name, dcp_files.UNREAD) for name in tensors if not is_bucket(name)}
    unread |= {} if known else dict.fromkeys(sorted(in_buckets), comparison.NO_PLACES)
    unread = {name: why for name, why in unread.items() if name not in hashed}
    fingerprints = _named(hashed, files.of_megatron)
    checked = None if found.recorded is None else comparison.with_record(found.recorded, fingerprints, unread)
    return Contents(fingerprints, unread, checked)


def _layouts(recorded: Any) -> dict[str, buckets.Layout]:
    """The layouts of buckets in a record; none if it has none, or is none, which the comparison reports."""
    try:
        return buckets.layouts(from_plain(recorded).buckets) if recorded is not None else {}
    except NotARecord:
        return {}


def _named(hashed: files.Hashes, names: files.Names) -> list[Fingerprint]:
    return [Fingerprint(*names(name), *hashed[name]) for name in sorted(hashed)]
