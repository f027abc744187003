"""Recommend what to do about a checkpoint, with the command for it."""

import contextlib
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ckpt_patches.audit import damages, repair_list
from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, TO_RESUME_FROM, WHOLE, Report
from ckpt_patches.audit.damages import NOTE, Finding, FindingKind
from ckpt_patches.audit.repair import repair, same_run
from ckpt_patches.errors import UserError

REFUSED = {DAMAGED: "It cannot be repaired", INCOMPLETE: "The save did not finish"}
# Megatron's sharding types that 0.16 and later do not load. They load the last one if the checkpoint names it.
OLD = ("fully_sharded_model_space", "fully_sharded_bucket_space", "dp_zero_gather_scatter")


@dataclass(frozen=True)
class Step:
    """Something to do."""

    what: str
    command: str = ""  # for a shell; empty without a command


@dataclass(frozen=True)
class Recommendation:
    """The recommendation for a checkpoint."""

    steps: tuple[Step, ...]
    refused: dict[Finding, str]  # what cannot be repaired, with the reason
    repair: str  # the command; empty if nothing can be repaired
    others: tuple[Report, ...]  # other checkpoints of the same audit


def recommend_for(report: Report, reports: Iterable[Report]) -> Recommendation:
    """What to do about one of the checkpoints of an audit."""
    others = tuple(other for other in reports if other is not report)
    if report.verdict in TO_RESUME_FROM:
        what = "It can be resumed from."
        if report.verdict != WHOLE:
            what += f" {report.repaired} elements are not the run's own: they were repaired."
        return Recommendation((Step(what), *_migrate(report, report.checkpoint.path)), {}, "", others)
    if {own.kind for own in report.findings if own.kind.severity != NOTE} == {damages.MIXED_ROWS}:
        what = "Put its rows in place, in a copy:"
        return Recommendation((Step(what, _migrated(report.checkpoint.path)),), {}, "", others)
    older, plan = _planned(report, others)
    refused = dict(plan.refused)
    new = _beside(report.checkpoint.path, "repaired")
    if not report.checkpoint.shards or (refused and not plan.is_possible):
        return Recommendation((_instead(report, others),), refused, "", others)
    given: list[str | Path] = ["--from", older.checkpoint.path] if older else []
    command = line("ckpt-patches", "repair", report.checkpoint.path, "--output", new, *given)
    if refused:
        what = f"Some of the damage can be repaired, in a copy, which stays {report.verdict}:"
        return Recommendation((_instead(report, others), Step(what, command)), refused, command, others)
    what = "Repair it, in a copy. No element changes but those that are damaged."
    what += (
        ""
        if older or not _of_moments(plan)
        else (" Lost moments are reset to zero: with --from OLDER they come from an older checkpoint that is complete.")
    )
    return Recommendation((Step(what, command), *_migrate(report, new)), {}, command, others)


def of_kind(kind: FindingKind, findings: Iterable[Finding], report: Report, advice: Recommendation) -> Step:
    """What to do about all findings of a kind."""
    path = report.checkpoint.path
    reasons = dict.fromkeys(advice.refused[f] for f in findings if f in advice.refused)
    what = kind.remedy
    if why := [reason for reason in reasons if reason and reason != kind.remedy]:
        what += f". Here it cannot be repaired: {'; '.join(why)}"
    if kind.severity != NOTE and not reasons and advice.refused and not advice.repair:
        what += ". Here a repair would be refused because of what else was found"
    if kind is damages.UNREADABLE:
        return Step(what, line("ckpt-patches", "audit", path))
    if kind is damages.STALE_LIST:
        return Step(what, line("rm", path / repair_list.NAME))
    if kind is damages.MIXED_ROWS:
        return Step(what, _migrated(path))
    if kind is damages.LARGE_PADDING:
        return Step(what, _convert(path, _beside(path, "universal")))
    if kind in (damages.ELEMENT_COUNT, damages.INTERRUPTED):
        return Step(what, _converted_again(report, advice))
    return Step(what, "" if kind.severity == NOTE or reasons else advice.repair)


def line(*words: "str | Path") -> str:
    """A shell command line of these words. Paths are made absolute."""
    return " ".join(_quoted(os.path.abspath(word) if isinstance(word, Path) else word) for word in words)


def _quoted(word: str) -> str:
    """Quote a word for a shell, with printable characters only."""
    if word.isprintable():
        return shlex.quote(word)
    shown = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in os.fsencode(word)
    )
    return f"$'{shown}'"


def _planned(report: Report, others: tuple[Report, ...]) -> tuple[Report | None, repair.Plan]:
    """The repair plan, and its source: the newest suitable complete checkpoint before it, or None."""
    for older in sorted((other for other in others if _is_older(other, report)), key=_step, reverse=True):
        made = repair.plan(report, older)
        if not made.refused and _of_moments(made) and _is_of_the_run(older, report):
            return older, made
    return None, repair.plan(report, None)


def _is_older(other: Report, report: Report) -> bool:
    step = report.checkpoint.step
    return _can_replace(other, report) and step is not None and _step(other) < step


def _is_of_the_run(older: Report, report: Report) -> bool:
    """Whether `repair` would accept it as the source."""
    with contextlib.suppress(UserError, OSError):
        same_run.check(report.checkpoint, older.checkpoint, trust=False)
        return True
    return False


def _can_replace(other: Report, report: Report) -> bool:
    """Whether a run can resume from another checkpoint instead."""
    return other.verdict in TO_RESUME_FROM and other.checkpoint.format == report.checkpoint.format


def _step(report: Report) -> int:
    return -1 if report.checkpoint.step is None else report.checkpoint.step


def _of_moments(plan: repair.Plan) -> bool:
    return any(fill.source != repair.FROM_WEIGHT for fill in plan.fills)


def _instead(report: Report, others: tuple[Report, ...]) -> Step:
    """What to do if a checkpoint cannot be repaired."""
    complete = [other for other in others if _can_replace(other, report)]
    begin = REFUSED.get(report.verdict, "Whether it is complete could not be determined")
    if complete:
        best = max(complete, key=_step)
        step = f", step {best.checkpoint.step}" if best.checkpoint.step is not None else ""
        return Step(f"{begin}. Resume from {best.checkpoint.path.name}{step}.")
    parent = Path(os.path.abspath(report.checkpoint.path)).parent
    return Step(f"{begin}. To find one to resume from among its neighbors:", line("ckpt-patches", "audit", parent))


def _migrate(report: Report, path: Path) -> tuple[Step, ...]:
    """A migration step if only megatron-core up to 0.15 loads the checkpoint."""
    found = report.checkpoint
    is_old = found.sharding in OLD and not (found.sharding == OLD[-1] and found.names_sharding)
    if found.format != "megatron zarr" and not (found.format == "megatron torch_dist" and is_old):
        return ()
    what = "For megatron-core 0.16 and later, which do not load this format, migrate it:"
    return (Step(what, _migrated(path)),)


def _migrated(path: Path) -> str:
    return line("ckpt-patches", "migrate", path, "--output", _beside(path, "migrated"))


def _converted_again(report: Report, advice: Recommendation) -> str:
    """Convert the ZeRO checkpoint of the same step, if exactly one was audited; else a placeholder."""
    step = report.checkpoint.step
    zero = [other.checkpoint for other in advice.others if other.checkpoint.format == "deepspeed zero"]
    source = [own.path for own in zero if own.step == step]
    return _convert(source[0] if len(source) == 1 else "ZERO_CHECKPOINT", _beside(report.checkpoint.path, "again"))


def _convert(source: "str | Path", to: Path) -> str:
    return line("ckpt-patches", "to-universal", "--input-folder", source, "--output-folder", to)


def _beside(path: Path, word: str) -> Path:
    path = Path(os.path.abspath(path))
    return path.with_name(f"{path.name}-{word}")
