"""Compare the states in a checkpoint's files with the fingerprints recorded at save: docs/guides/fingerprint.md."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ckpt_patches.convert import zero_fingerprints
from ckpt_patches.errors import UserError, one_line
from ckpt_patches.fingerprint import contents, files, record_files
from ckpt_patches.fingerprint.comparison import Verdict
from ckpt_patches.formats import damages, zero_reader
from ckpt_patches.formats.checkpoint import Checkpoint
from ckpt_patches.formats.damages import Finding

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
    repaired = {files.of_megatron(array) for array, _ in found.repaired}
    for parameter, state, _, what in checked.differences:
        kind = damages.REPAIRED if (parameter, state) in repaired else damages.NOT_AS_RECORDED
        yield Finding(kind, parameter, detail=f"{state}: {what}")
    examples = [f", as {what}: {why}" for what, why in checked.not_verified.items()]
    kind = damages.NOT_JUDGED if checked.missed else damages.RECORDED
    yield Finding(kind, "the optimizer's state", detail=checked.sentence() + "".join(examples[:1]))


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
    except (UserError, OSError) as error:  # another finding reports the damage
        return Verdict(not_verified={"the optimizer's state": one_line(error)}, missed=True)


def _of_deepspeed(path: Path, workers: int) -> Verdict | None:
    if not zero_reader.is_zero(path):
        return contents.of(files.opened(path), workers, quiet=True).checked
    return contents.of_zero(path, *zero_fingerprints.read(path, trust=True, workers=workers)).checked
