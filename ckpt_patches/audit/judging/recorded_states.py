"""Compare the states in a checkpoint's files with the fingerprints recorded at save: docs/fingerprint.md."""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ckpt_patches.convert import zero_fingerprints
from ckpt_patches.errors import UserError
from ckpt_patches.fingerprint import buckets, dcp_files, megatron_files, offline, record_files, universal_states
from ckpt_patches.fingerprint.states import Fingerprint
from ckpt_patches.formats import damages, megatron_torch
from ckpt_patches.formats.checkpoint import Checkpoint
from ckpt_patches.formats.damages import Finding
from ckpt_patches.formats.dcp import is_dcp
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.universal import is_universal
from ckpt_patches.runtime.processes import in_order

# Zeros and padding, about which a record decides. Weights are not in every record, so rounding is still judged.
DECIDED = (damages.LOST_MOMENT, damages.NO_MOMENTS, damages.ODD_IN_BUCKET)


def decide(found: Checkpoint, workers: int) -> None:
    """Add the findings of `findings`. If all states are as recorded, zeros and padding are as the run had them."""
    checked = _checked(found, found.path, workers)
    if checked is None:
        return
    if checked.compared and not (checked.differences or checked.unchecked or checked.missed):
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


def _findings(found: Checkpoint, checked: offline.Checked) -> Iterator[Finding]:
    repaired = {megatron_files.parameter_and_state(array) for array, _ in found.repaired}
    for parameter, state, what in checked.differences:
        kind = damages.REPAIRED if (parameter, state) in repaired else damages.NOT_AS_RECORDED
        yield Finding(kind, parameter, detail=f"{state}: {what}")
    examples = [f", as {what}: {why}" for what, why in checked.unchecked.items()]
    kind = damages.NOT_JUDGED if checked.missed else damages.RECORDED
    yield Finding(kind, "the optimizer's state", detail=checked.sentence() + "".join(examples[:1]))


def _checked(found: Checkpoint, path: Path, workers: int) -> offline.Checked | None:
    """None if nothing was recorded."""
    if not found.format.startswith("deepspeed") and megatron_torch.folders(path):
        return _of_ranks(path)
    try:
        if found.format.startswith("deepspeed"):
            plain = record_files.of_deepspeed(path)
            files = universal_states if is_universal(path) else zero_fingerprints
            return None if plain is None else offline.check(plain, files.fingerprints(path, trust=True))
        if found.recorded is not None and is_dcp(path):
            index = dcp_files.read(path)
            return dcp_files.check(path, index, dcp_files.hashes(path, index))
    except UserError as error:  # another finding reports the damage
        return offline.Checked(0, [], {"the optimizer's state": str(error)})
    return None if found.recorded is None else offline.check(found.recorded, _of_files(found, path, workers))


def _of_ranks(path: Path) -> offline.Checked | None:
    try:
        of_ranks = [one.checked() for one in offline.of_torch(path) if one.plain is not None]
    except UserError:  # another finding reports the damaged or missing file
        return None
    return offline.together(of_ranks) if of_ranks else None


def _of_files(found: Checkpoint, path: Path, workers: int) -> Iterator[Fingerprint]:
    stored = megatron_files.read(path)
    names = sorted(stored.keys() - megatron_files.left_out(stored).keys())
    for one in in_order(partial(_fingerprint, path, stored), names, workers):
        if one is not None:
            yield one
    with contextlib.suppress(UserError):  # another finding reports the file
        yield from offline.of_buckets(found.recorded, partial(buckets.in_distributed, path, stored))


def _fingerprint(path: Path, stored: megatron_files.Stored, name: str) -> Fingerprint | None:
    with RangedFiles() as files:
        try:
            return megatron_files.fingerprint(files, path, stored[name])
        except UserError:
            return None
