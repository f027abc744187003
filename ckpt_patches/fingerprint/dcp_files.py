"""The fingerprints of checkpoints that training scripts write with torch.distributed.checkpoint. Needs no torch."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ckpt_patches.fingerprint import comparison, dcp_settings
from ckpt_patches.fingerprint.comparison import Checked
from ckpt_patches.fingerprint.record import NotARecord, Record, from_plain
from ckpt_patches.fingerprint.states import OF_BUFFER, Fingerprint, buffer_digest
from ckpt_patches.fingerprint.verdict import BUFFER, OTHER, Difference, Key
from ckpt_patches.formats import dcp, torch_dist, torch_file
from ckpt_patches.formats.dcp import MASTERS
from ckpt_patches.formats.ranged import RangedFiles
from ckpt_patches.formats.recorded import KEY, from_text, is_record
from ckpt_patches.runtime.shown import shown

Entry = TypeVar("Entry")
UNREAD = "its elements have no fingerprint"
Hashes = Mapping[str, tuple[int, int]]  # elements and hash, by a tensor's name in the index


def read(path: Path) -> torch_dist.Index:
    """The index of a checkpoint; reads no elements.

    Raises:
        UserError: an index is missing, damaged or of an unsupported kind.
    """
    return dcp.merged(path, [(folder, torch_dist.read_index(folder)) for folder in dcp.folders(path)])


def recorded(path: Path, index: torch_dist.Index) -> dict[str, Any]:
    """The values of the records' entries, by the prefix of their names.

    Raises:
        BadFileError, NotReadError: a record's entry cannot be read.
    """
    with RangedFiles() as files:
        names = filter(is_record, sorted(index.objects))
        return {n.removesuffix(KEY): torch_dist.read_place(files, path, index.objects[n]).value for n in names}


def fingerprints(index: torch_dist.Index, hashed: Hashes) -> list[Fingerprint]:
    """The fingerprints of the hashed tensors that are in an index."""
    named = names(index)
    return [Fingerprint(*named[name], *hashed[name]) for name in sorted(named) if name in hashed]


def check(path: Path, index: torch_dist.Index, hashed: Hashes) -> Checked | None:
    """Compare states and settings with the records, each with the entries beside it; None without a record.

    Raises:
        BadFileError, NotReadError: a record, or another object, cannot be read.
    """
    records = recorded(path, index)
    found: dict[str, Checked] = {}
    for prefix, value in records.items():
        beside = _beside(index, prefix, records)
        # The same record beside a model and its optimizer, in folders of their own, is one.
        what = value if beside is index and isinstance(value, str) else f"of {prefix}"
        if what not in found:
            found[what] = _check(path, beside, from_text(value), hashed)
    return comparison.together(list(found.values())) if found else None


def _beside(index: torch_dist.Index, prefix: str, prefixes: Iterable[str]) -> torch_dist.Index:
    """The entries with a record's prefix, except those of records further inside; all if no optimizer is there.

    If the model is elsewhere, as in `{"model": …, "optimizer": {…, record}}`, so are the tensors of no optimizer.
    """
    inner = tuple(other for other in prefixes if other != prefix and other.startswith(prefix))

    def own(entries: Mapping[str, Entry]) -> dict[str, Entry]:
        return {n: entry for n, entry in entries.items() if n.startswith(prefix) and not n.startswith(inner)}

    found = torch_dist.Index(own(index.tensors), own(index.objects))
    if not (optimizers := dcp.optimizers(found.tensors, found.objects)):
        return index
    if not dcp.others(found.tensors, [optimizer.prefix for optimizer in optimizers]):
        every = dcp.optimizers(index.tensors, index.objects)
        elsewhere = dcp.others(index.tensors, [optimizer.prefix for optimizer in every])
        found.tensors.update({name: index.tensors[name] for name in elsewhere})
    return index if len(found.tensors) == len(index.tensors) else found


def _check(path: Path, index: torch_dist.Index, plain: Any, hashed: Hashes) -> Checked:
    """Compare the states and settings of an index with one record."""
    try:
        record = from_plain(plain)
    except NotARecord:
        return comparison.with_record(plain, ())  # it has the reason
    optimizers = dcp.optimizers(index.tensors, index.objects)
    of_model, doubt = _model_prefix(index, optimizers, record, hashed)
    unread = {" ".join(key): UNREAD for name, key in names(index).items() if name not in hashed}
    states = comparison.with_record(plain, _named(optimizers, record, fingerprints(index, hashed), of_model), unread)
    unsure = Checked(0, [], {"the weights": doubt} if doubt else {}, missed=bool(doubt) or not record.states)
    buffers = _buffers(path, index, record, of_model or "")
    return comparison.together([states, dcp_settings.check(path, index, record), buffers, unsure])


def _buffers(path: Path, index: torch_dist.Index, record: Record, prefix: str) -> Checked:
    """Compare the buffers that are no floats, of which the run recorded digests; those in several parts are not.

    Raises:
        BadFileError, NotReadError: one cannot be read.
    """
    names = {what: index.tensors.get(prefix + what.removeprefix(BUFFER)) for what in record.others}
    equal, differences, not_verified = 0, [], {}
    with RangedFiles() as files:
        for what, tensor in names.items():
            if tensor is None or not what.startswith(BUFFER):
                continue
            if [*tensor.places] != [(0,) * len(tensor.size)]:
                not_verified[what] = "it is stored in several parts"
                continue
            read = torch_dist.read_chunk(files, path, tensor, next(iter(tensor.places)))
            data = memoryview(torch_file.data_of(read.path, read.value))
            digest = buffer_digest(tensor.dtype, tensor.size, [data] if data else [])
            if digest == record.others[what]["value"]:
                equal += 1
            else:
                differences.append(Difference(what.removeprefix(BUFFER), OF_BUFFER, OTHER, "other values"))
    return Checked(equal, differences, not_verified)


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


def names(index: torch_dist.Index) -> dict[str, Key]:
    """The parameter and state of each tensor; "model" if it is not an optimizer's."""
    found: dict[str, Key] = {}
    optimizers = dcp.optimizers(index.tensors, index.objects)
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
