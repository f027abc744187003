"""Compare the states in a checkpoint's files with the fingerprints recorded at save: docs/guides/fingerprint.md."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_patches.audit.ranges import FileRanges, Range
from ckpt_patches.convert import zero_fingerprints
from ckpt_patches.errors import UserError, one_line
from ckpt_patches.fingerprint import buckets, contents, dcp_files, files, record_files
from ckpt_patches.fingerprint.comparison import AGAIN, Verdict, recorded_name
from ckpt_patches.fingerprint.record import Key, from_plain
from ckpt_patches.fingerprint.states import state_named
from ckpt_patches.formats import damages, dcp, zero_reader
from ckpt_patches.formats.checkpoint import Checkpoint
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.megatron_names import is_bucket

# Zeros and padding, about which a record decides. Weights are not in every record, so rounding is still judged.
DECIDED = (damages.LOST_MOMENT, damages.NO_MOMENTS, damages.ODD_IN_BUCKET)


def decide(found: Checkpoint, workers: int) -> None:
    """Add the findings of `findings`. If all states are as recorded, zeros and padding are as the run had them."""
    checked = _checked(found, found.path, workers)
    if checked is None:
        return
    if checked.verified and checked.is_equal and not checked.not_verified:
        found.findings[:] = [finding for finding in found.findings if finding.kind not in DECIDED]
    found.findings += _findings(found, checked)


def findings(found: Checkpoint, path: Path, workers: int) -> Iterator[Finding]:
    """Findings for states that differ from the record, and a note on the comparison. Nothing without a record.

    States that cannot be read are not compared; another finding has the reason. States listed as repaired may differ.

    Args:
        found: the checkpoint that has the record.
        path: folder of the files, its own or converted from it; they are read again.
        workers: number of processes that read.
    """
    checked = _checked(found, path, workers)
    return iter(()) if checked is None else _findings(found, checked)


def _findings(found: Checkpoint, checked: Verdict) -> Iterator[Finding]:
    repaired = keys_of(found, found.repaired) if checked.differences else ()
    for parameter, state, _, what in checked.differences:
        if (parameter, state) in repaired:  # a record has one number for all elements of a state
            detail = f"{state}: {what}, and whether those that were not repaired are as recorded cannot be told"
            yield Finding(damages.REPAIRED, parameter, detail=detail)
        else:
            yield Finding(damages.NOT_AS_RECORDED, parameter, detail=f"{state}: {what}")
    examples = [f", as {what}: {why}" for what, why in checked.not_verified.items()]
    kind = damages.NOT_JUDGED if checked.missed else damages.RECORDED
    yield Finding(kind, "the optimizer's state", detail=checked.sentence() + "".join(examples[:1]))


def keys_of(found: Checkpoint, ranges: Mapping[tuple[str, str], Sequence[Range]]) -> set[Key]:
    """The states that have elements in these ranges, by array and shard: by parameter and name, as in a record."""
    names = {name for name, _ in ranges if not is_bucket(name)} | {*_in_buckets(found, ranges)}
    if found.format == "deepspeed universal":
        keys = [files.of_universal(name) for name in names]
    elif found.format.startswith("deepspeed"):
        keys = [(parameter, state_named(key)) for parameter, _, key in (name.rpartition(".") for name in names)]
    elif dcp.is_dcp(found.path):
        keys = [(one.parameter, one.state) for one in dcp_files.read(found.path, dict.fromkeys(names, (0, 0)), {})[0]]
    else:
        keys = [files.of_megatron(name) for name in names]
    return {(recorded_name(parameter), "master" if state == AGAIN else state) for parameter, state in keys}


def _in_buckets(found: Checkpoint, ranges: Mapping[tuple[str, str], Sequence[Range]]) -> Iterator[str]:
    """The names of states of parameters in Megatron's buckets that have elements in these ranges."""
    if found.recorded is None or not any(is_bucket(array) for array, _ in ranges):
        return
    own = FileRanges(
        extent
        for shard in found.shards
        for stream in shard.streams.values()
        for begin, end in ranges.get((stream.array, shard.label), ())
        for extent in stream.part(begin, end)
    )
    layouts = buckets.layouts(from_plain(found.recorded).buckets)
    for name, parts in files.tensors_in_buckets(found, layouts).items():
        if any(own.meet(one) for part in parts for one in part.stream.part(part.begin, part.begin + part.numel)):
            yield name


def _checked(found: Checkpoint, path: Path, workers: int) -> Verdict | None:
    """None if nothing was recorded."""
    try:
        if found.format.startswith("deepspeed"):
            plain = record_files.of_deepspeed(path)
            return None if plain is None else _of_deepspeed(path, workers)
        if found.recorded is None:
            return None
        own = found if found.path == path else replace(files.opened(path), recorded=found.recorded)
        return contents.of(own, workers, quiet=True).checked
    except (UserError, OSError) as error:
        is_reported = any(finding.kind.severity in (damages.DAMAGE, damages.INCOMPLETE) for finding in found.findings)
        return Verdict(not_verified={"the optimizer's state": one_line(error)}, missed=not is_reported)


def _of_deepspeed(path: Path, workers: int) -> Verdict | None:
    if not zero_reader.is_zero(path):
        return contents.of(files.opened(path), workers, quiet=True).checked
    return contents.of_zero(path, *zero_fingerprints.read(path, trust=True, workers=workers)).checked
