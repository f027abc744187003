"""The tools for checkpoints, from Python: what the commands do, as functions. The names in `__all__` are public.

    from ckpt_patches import api

    found = api.audit("run1/global_step1000")
    if not found.ok:
        print(found.verdict, found.findings)
    path = api.resume_from("run1")

Paths are `str` or `Path`. A missing folder is FileNotFoundError, and what the commands report with exit status 2 is
UserError. Worker processes read the files; but a process with other threads, a process group or a context of CUDA must
not be forked, and does the work alone. What the commands print on standard error is logged (logger `ckpt_patches`).
"""

import errno
import os

from ckpt_patches.errors import UserError

TYPE_CHECKING = False  # as in `typing`, which takes longer to import than this module may
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

    from torch import nn, optim

    from ckpt_patches.convert.convert import Summary as Conversion
    from ckpt_patches.fingerprint.comparison import Verdict
    from ckpt_patches.migrate.migrate import Summary as Migration

    AnyPath = str | Path

__all__ = [
    "Audit",
    "NoGoodCheckpointError",
    "Result",
    "UserError",
    "Verification",
    "audit",
    "compare",
    "migrate",
    "repair",
    "resume_from",
    "to_universal",
    "verify_resume",
]


class NoGoodCheckpointError(UserError):
    """A run has checkpoints, and none is verified as good. A training that began anew could overwrite them."""


class Result:
    """The result of a command. `ok`: `compare` found states and no difference; a repair that cannot be whole raises."""

    def __init__(self, ok: bool, document: "dict[str, Any]") -> None:
        self.ok = ok
        self._document = document

    def to_dict(self) -> "dict[str, Any]":
        """What the command prints with `--json` (docs/reference/json.md); for `audit`, with `--json-lines`."""
        return self._document


class Audit(Result):
    """The report on one checkpoint. `ok`: it is WHOLE or REPAIRED, so it can be resumed from."""

    @property
    def verdict(self) -> str:
        """WHOLE, REPAIRED, DAMAGED, INCOMPLETE or UNKNOWN."""
        return str(self._document["verdict"])

    @property
    def findings(self) -> "list[dict[str, Any]]":
        """Each with `name`, `severity`, `array`, `shard`, `range`, `detail` and `remedy`."""
        return list(self._document["findings"])


class Verification:
    """A comparison of a training's state with a record. `ok`: its optimizer's states were compared, and are equal."""

    def __init__(self, verdict: "Verdict") -> None:
        self.ok = bool(verdict.verified) and verdict.is_equal
        self.verified = len(verdict.verified)  # equal states
        self.differences = list(verdict.differences)  # of states
        self.settings = list(verdict.settings)  # of param groups and others, that differ
        self.not_verified = dict(verdict.not_verified)  # by name, the reason
        self.text = "\n".join(verdict.lines())  # what `fingerprint.prove` logs


def audit(path: "AnyPath", *, workers: int | None = None) -> Audit:
    """Read and judge one checkpoint, as `ckpt-patches audit`.

    Args:
        path: the folder that is resumed from, such as `global_step1000` or `checkpoint-1000`.
        workers: processes that read; None for as many as processors, at most 16.

    Raises:
        UserError: the folder has no checkpoint, or several.
    """
    folder = _folder(path)
    from ckpt_patches.audit import audit as audits
    from ckpt_patches.audit.report.text_report import line_as_json
    from ckpt_patches.audit.run_folder import saves, unit_of
    from ckpt_patches.audit.unit import joined
    from ckpt_patches.runtime.processes import safe_workers

    parts = saves(folder)
    if {unit_of(part, folder) for part in parts} != {folder}:
        raise UserError(f"{folder}: expected one checkpoint, found {'a folder of several' if parts else 'none'}")
    with safe_workers(workers) as count:
        report = joined(folder, [audits.audit(part, count) for part in parts])
    return Audit(report.verdict in audits.TO_RESUME_FROM, line_as_json(report))


def resume_from(run: "AnyPath", *, quick: bool = False, workers: int | None = None) -> "Path | None":
    """The newest good checkpoint of a run, as `ckpt-patches resume-from`; None if the folder has no checkpoint.

    With several ranks, one of them calls it, or better the script that starts them: it can read for minutes.

    Args:
        run: the folder of the checkpoints.
        quick: look at structure alone, in seconds. Damaged elements are not found.

    Raises:
        NoGoodCheckpointError: it has checkpoints, and none is verified as good or of a known format.
        UserError: it has several runs.
    """
    folder = _folder(run)
    from ckpt_patches.audit import resume_from as search
    from ckpt_patches.runtime.processes import safe_workers

    with safe_workers(workers) as count:
        answer = search.resume_from(folder, count, quick=quick, say=lambda own: _warn(str(own)))
    if answer.save is None and not answer.is_empty:
        raise NoGoodCheckpointError(answer.lines()[-1])
    return answer.save.path if answer.save else None


def compare(one: "AnyPath", other: "AnyPath", *, workers: int | None = None) -> Result:
    """Compare two checkpoints as training states, whatever their formats and ranks, as `ckpt-patches compare`.

    Raises:
        UserError: a checkpoint is damaged, or of an unsupported kind.
    """
    from ckpt_patches.cli import fingerprint_command
    from ckpt_patches.runtime.distributed import Ranks
    from ckpt_patches.runtime.processes import safe_workers

    with safe_workers(workers) as count:
        read = [fingerprint_command.read(_folder(own), count, Ranks(), trust=False) for own in (one, other)]
    found = fingerprint_command.compared(*read)
    return Result(found.is_equal, fingerprint_command.as_json(found))


def repair(
    path: "AnyPath",
    output: "AnyPath",
    *,
    older: "AnyPath | None" = None,
    reset_moments: bool = False,
    workers: int | None = None,
) -> Result:
    """Repair a copy of a damaged checkpoint, as `ckpt-patches repair PATH --output NEW --from OLDER`.

    Raises:
        UserError: nothing is to be repaired, or it cannot be without a guess. Nothing was written.
        OSError: a file cannot be read or written.
    """
    folder, source = _folder(path), None if older is None else _folder(older)
    from pathlib import Path

    from ckpt_patches.audit.repair import repair as repairs
    from ckpt_patches.runtime.processes import safe_workers

    with safe_workers(workers) as count:
        result = repairs.repair(folder, Path(output), source, count, reset_moments=reset_moments, say=_warn)
    return Result(True, result.as_json())


def to_universal(path: "AnyPath", output: "AnyPath", *, workers: int | None = None) -> "Conversion":
    """Convert a ZeRO checkpoint to a universal one, as `ckpt-patches to-universal PATH --output NEW`.

    Raises:
        UserError: the checkpoint is damaged or of an unsupported kind, or the output exists.
        OSError: a file cannot be read or written. The same call continues.
    """
    folder = _folder(path)
    from pathlib import Path

    from ckpt_patches.convert.convert import WORKERS, Options, convert
    from ckpt_patches.runtime.processes import safe_workers
    from ckpt_patches.runtime.unfinished import check_parent

    check_parent(Path(output))
    with safe_workers(workers or WORKERS) as count:
        return convert(folder, output, Options(count), warn=_warn)


def migrate(path: "AnyPath", output: "AnyPath", *, workers: int | None = None) -> "Migration":
    """Convert an old Megatron checkpoint, as `ckpt-patches migrate OLD --output NEW`.

    Raises:
        UserError: the checkpoint is damaged, needs nothing, or is of an unsupported kind; or the output exists.
        OSError: a file cannot be read or written. The same call continues.
    """
    folder = _folder(path)
    from pathlib import Path

    from ckpt_patches.migrate import migrate as migrations
    from ckpt_patches.runtime.processes import safe_workers

    with safe_workers(workers) as count:
        summary = migrations.migrate(folder, Path(output), migrations.Options(count), warn=_warn)
    assert summary is not None  # there is one rank
    return summary


def verify_resume(
    model: "nn.Module",
    optimizer: "optim.Optimizer | Sequence[optim.Optimizer]",
    record: str | None,
    group: "Any" = None,
) -> Verification:
    """Compare the live state after a load with the record of the save (`ckpt_patches.fingerprint.of_training`).

    Every rank of the group calls it. Unlike `fingerprint.prove`, it neither raises an error for a difference nor logs.
    """
    from ckpt_patches.fingerprint import proof, training_state
    from ckpt_patches.formats.recorded import from_text

    return Verification(proof.verdict_of(training_state.live(model, optimizer), from_text(record), group))


def _folder(path: "AnyPath") -> "Path":
    """Raises: FileNotFoundError, NotADirectoryError."""
    from pathlib import Path

    if not os.path.isdir(path):  # an empty path is none: `Path("")` would be the current folder
        kind = errno.ENOTDIR if os.path.exists(path) else errno.ENOENT
        raise OSError(kind, os.strerror(kind), str(path))
    return Path(path)


def _warn(line: str) -> None:
    import logging

    logging.getLogger("ckpt_patches").warning(line)
