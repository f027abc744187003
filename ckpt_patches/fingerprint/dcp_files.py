"""The fingerprints of checkpoints that training scripts write with torch.distributed.checkpoint. Needs no torch."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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

Found = tuple[
    list[Fingerprint], dict[str, str], Verdict | None
]  # what has none, and the comparison if there is a record
UNREAD = "its elements have no fingerprint"
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
    names = _names(index, optimizers)
    found = [Fingerprint(*key, *hashed[name]) for name, key in sorted(names.items()) if name in hashed]
    unread = {
        parameter if state == "model" else f"{parameter} {state}": why.get(name, UNREAD)
        for name, (parameter, state) in names.items()
        if name not in hashed
    }
    with RangedFiles() as files:
        entries = [index.objects[name] for name in sorted(index.objects) if is_record(name)]
        records = [torch_dist.read_place(files, path, entry).value for entry in entries]
    if not records:
        return found, unread, None
    if records.count(records[0]) == len(records):
        return found, unread, _compared(index, optimizers, from_text(records[0]), hashed, found, unread)
    several = "the checkpoint has several, of several models, which a load alone can compare"
    return found, unread, Verdict(not_verified={"the record": several}, missed=True)


def _compared(
    index: torch_dist.Index,
    optimizers: Sequence[dcp.Optimizer],
    plain: Any,
    hashed: Hashes,
    found: list[Fingerprint],
    unread: Mapping[str, str],
) -> Verdict:
    """Compare states and steps with the record."""
    try:
        record = from_plain(plain)
    except NotARecord:
        return comparison.with_record(plain, ())  # it has the reason
    of_model, doubt = _model_prefix(index, optimizers, record, hashed)
    states = comparison.with_record(plain, _named(optimizers, record, found, of_model), unread)
    unsure = Verdict(not_verified={"the weights": doubt} if doubt else {}, missed=bool(doubt) or not record.states)
    return comparison.together([states, Verdict(differences=list(_other_steps(record, found))), unsure])


def _other_steps(record: Record, found: Iterable[Fingerprint]) -> Iterator[Difference]:
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
    several = {one for optimizer in optimizers for one in optimizer.several}

    def equal(prefix: str) -> int:
        return sum(hashed.get(f"{prefix}{name}") == (state.numel, state.value) for name, state in own.items())

    counts = {prefix: equal(prefix) for prefix in sorted(several) if equal(prefix)}
    if counts:
        is_one = len(counts) == 1 or set(counts.values()) == {len(own)}
        doubt = "" if is_one else f"some are the same under each of {', '.join(map(shown, counts))}"
        return max(counts, key=lambda prefix: counts[prefix]), doubt
    return dcp.weights_prefix(index.tensors, optimizers, set(own)), ""


def _named(
    optimizers: Sequence[dcp.Optimizer], record: Record, found: list[Fingerprint], of_model: str | None
) -> list[Fingerprint]:
    """The fingerprints under the record's names.

    Optimizers without any state, or with several candidates for their weights, do not show which tensors are their
    weights: the record's names do.
    """
    owners = Counter(parameter for own in optimizers for parameter in own.states)
    if any(own.weights for own in optimizers) or max(owners.values(), default=0) > 1:
        return found
    parameters = {parameter for parameter, _ in record.states}
    is_unknown = bool(optimizers) and all(own.several or not own.states for own in optimizers)

    def named(one: Fingerprint) -> Fingerprint:
        name = one.parameter.removeprefix(of_model or "")
        if one.state != "model" or name not in parameters:
            return one
        state = next((s for s in ("weight", "master") if is_unknown and (name, s) in record.states), one.state)
        return one._replace(parameter=name, state=state)

    return list(map(named, found))


def _names(index: torch_dist.Index, optimizers: Sequence[dcp.Optimizer]) -> dict[str, Key]:
    """The parameter and state of each tensor; "model" if it is not an optimizer's."""
    found: dict[str, Key] = {}
    for own in optimizers:
        for parameter, states in own.states.items():
            has_main = any(states.get(name) in index.tensors for name in MASTERS)
            if parameter in own.weights:
                found[own.weights[parameter]] = parameter, "weight" if has_main else "master"
            for state, name in states.items():
                found[name] = parameter, "master" if state in MASTERS else state
        of_model = next(iter({w.removesuffix(p) for p, w in own.weights.items()}), None)
        for name in index.tensors.keys() - found.keys() if of_model is not None else ():
            if name.startswith(of_model or ""):
                found[name] = name.removeprefix(of_model or ""), "model"
    rest = {name: (name, "model") for name in index.tensors}
    named = {name: place for name, place in {**rest, **found}.items() if name in index.tensors}
    # Parameters of several models can have the same names: theirs are those in the index.
    counts, owners = Counter(named.values()), Counter(parameter for own in optimizers for parameter in own.states)
    is_one = {name: counts[place] == 1 and owners[place[0]] < 2 for name, place in named.items()}
    return {name: place if is_one[name] else (name, place[1]) for name, place in named.items()}
