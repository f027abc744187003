"""The fingerprints of checkpoints that training scripts write with torch.distributed.checkpoint. Needs no torch."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ckpt_patches.fingerprint import comparison
from ckpt_patches.fingerprint.comparison import OTHER, Difference, Verdict
from ckpt_patches.fingerprint.element_hash import of_run
from ckpt_patches.fingerprint.record import Key, NotARecord, Record, from_plain
from ckpt_patches.fingerprint.states import Fingerprint
from ckpt_patches.formats import dcp, torch_dist
from ckpt_patches.formats.dcp import MASTERS
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.recorded import from_text, is_record
from ckpt_patches.runtime.shown import shown

# What has a fingerprint; what has none, and the reason; and the comparison if there is a record
Found = tuple[list[Fingerprint], dict[str, str], Verdict | None]
UNREAD = "its elements have no fingerprint"
SEVERAL = "the checkpoint has several, of several models, which a load alone can compare"
Hashes = Mapping[str, tuple[int, int]]  # elements and hash, by a tensor's name in the index


def read(path: Path, hashed: Hashes, why: Mapping[str, str]) -> Found:
    """The fingerprints in a checkpoint; what has none, and why; and the comparison with the record, None without one.

    Args:
        path: the checkpoint's folder.
        hashed: of the tensors that could be read.
        why: reasons of others, by a tensor's name.

    Raises:
        UserError: an index, or the entry of a record, is missing, damaged or of an unsupported kind.
    """
    index = dcp.merged(path, [(folder, torch_dist.read_index(folder)) for folder in dcp.folders(path)])
    optimizers = dcp.optimizers(index.tensors, index.objects)
    with RangedFiles() as files:
        entries = [index.objects[name] for name in sorted(index.objects) if is_record(name)]
        records = [torch_dist.read_place(files, path, entry).value for entry in entries]
    record, of_model, doubt = Record({}), None, ""
    if records and records.count(records[0]) == len(records):
        with contextlib.suppress(NotARecord):  # the comparison has the reason
            record = from_plain(from_text(records[0]))
            of_model, doubt = _model_prefix(index, optimizers, record, hashed)
    names = _names(index, optimizers, record, of_model)
    found = [Fingerprint(*key, *hashed[name]) for name, key in sorted(names.items()) if name in hashed]
    unread = {
        parameter if state == "model" else f"{parameter} {state}": why.get(name, UNREAD)
        for name, (parameter, state) in names.items()
        if name not in hashed
    }
    if not records:
        return found, unread, None
    if records.count(records[0]) < len(records):
        return found, unread, Verdict(not_verified={"the record": SEVERAL}, missed=True)
    checked = comparison.with_record(from_text(records[0]), found, unread)
    return (
        found,
        unread,
        replace(
            checked,
            differences=[*checked.differences, *_other_steps(record, found)],
            not_verified={**checked.not_verified, **({"the weights": doubt} if doubt else {})},
            missed=checked.missed or bool(doubt) or not record.states,
        ),
    )


def _other_steps(record: Record, found: Sequence[Fingerprint]) -> Iterator[Difference]:
    """The steps in tensors that are not those that the run recorded."""
    for one in found:
        step: object = record.settings.get(one.parameter, {}).get("step")
        if one.state == "step" and one.numel == 1 and isinstance(step, (int, float)) and 0 <= step < 1 << 31:
            numbers = [np.array([step], dtype) for dtype in ("<f4", "<f8", "<i4", "<i8")]
            if one.value not in [of_run(number.view("<u4"), 0) for number in numbers if number[0] == step]:
                yield Difference(one.parameter, "step", OTHER, f"other than {step}, as in the run")


def _model_prefix(
    index: torch_dist.Index, optimizers: Sequence[dcp.Optimizer], record: Record, hashed: Hashes
) -> tuple[str | None, str]:
    """The prefix of the model's tensors, None if unknown; and why it is in doubt.

    Of several candidates it is the one with the recorded weights. If others have some of them, it is in doubt.
    """
    own = {parameter: state for (parameter, kind), state in record.states.items() if kind in ("master", "weight")}
    counts: Counter[str] = Counter()
    for prefix in sorted({one for optimizer in optimizers for one in optimizer.several}):
        counts[prefix] = sum(hashed.get(f"{prefix}{name}") == state[:2] for name, state in own.items())
    equal = {prefix: count for prefix, count in counts.items() if count}
    if not equal:
        return dcp.weights_prefix(index.tensors, optimizers, set(own)), ""
    is_one = len(equal) == 1 or set(equal.values()) == {len(own)}
    doubt = "" if is_one else f"some are the same under each of {', '.join(map(shown, equal))}"
    return max(equal, key=lambda prefix: equal[prefix]), doubt


def _names(
    index: torch_dist.Index, optimizers: Sequence[dcp.Optimizer], record: Record, of_model: str | None
) -> dict[str, Key]:
    """The parameter and state of each tensor; "model" if it is not an optimizer's.

    Optimizers without any state, or with several candidates for their weights, do not show which tensors are their
    weights: the names in the record do, after the prefix `of_model`.
    """
    found: dict[str, Key] = {}
    prefixes = set()
    for own in optimizers:
        for parameter, states in own.states.items():
            found |= {name: (parameter, "master" if state in MASTERS else state) for state, name in states.items()}
        for parameter, name in own.weights.items():
            has_main = any(own.states[parameter].get(master) in index.tensors for master in MASTERS)
            found[name] = parameter, "weight" if has_main else "master"
            prefixes.add(name.removesuffix(parameter))
    owners = Counter(parameter for own in optimizers for parameter in own.states)
    is_several = max(owners.values(), default=0) > 1  # parameters of several models can have the same names
    recorded = {parameter for parameter, _ in record.states}
    has_no_weights = bool(optimizers) and all(own.several or not own.states for own in optimizers)
    for name in index.tensors.keys() - found.keys():
        found[name] = name, "model"
        for prefix in sorted(prefixes):
            if name.startswith(prefix):
                found[name] = name.removeprefix(prefix), "model"
        its = name.removeprefix(of_model or "")
        if not prefixes and not is_several and its in recorded:
            kinds = [kind for kind in ("weight", "master") if has_no_weights and (its, kind) in record.states]
            found[name] = its, (*kinds, "model")[0]
    named = {name: place for name, place in found.items() if name in index.tensors}
    counts = Counter(named.values())
    is_one = {name: counts[place] == 1 and owners[place[0]] < 2 for name, place in named.items()}
    return {name: place if is_one[name] else (name, place[1]) for name, place in named.items()}
