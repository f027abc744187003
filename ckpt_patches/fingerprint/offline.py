"""Compare a run's record in a checkpoint with the checkpoint's files, without torch."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_patches.fingerprint import buckets
from ckpt_patches.fingerprint.element_hash import zeros
from ckpt_patches.fingerprint.record import NotARecord, Record, State, from_plain
from ckpt_patches.fingerprint.states import FROZEN, Difference, Fingerprint
from ckpt_patches.formats import megatron_torch, torch_file
from ckpt_patches.formats.recorded import KEY

CHAINED = re.compile(r"^chained_\d+\.")  # prefix of tensor names if there are several optimizers
# An expert by its number on its rank; with a single expert-parallel rank, this is the global number.
LOCAL_EXPERT = re.compile(r"\bdeepspeed_experts\.(\d+)\.")

OF_MODEL = ("master", "weight", FROZEN)  # states that are parameters themselves


class Checked(NamedTuple):
    """The result of a comparison."""

    compared: int  # number of states
    differences: list[Difference]
    unchecked: dict[str, str]  # by name, the reason
    missed: bool = False  # whether no state of an optimizer could be compared, though there is a record
    values: int = 0  # number of compared settings and buffers

    def sentence(self) -> str:
        """The result in one line."""
        rest = f"; {len(self.unchecked)} could not be compared" if self.unchecked else ""
        if not self.compared:
            return f"no state could be compared with what the run recorded when it saved{rest}"
        wrong = f"{len(self.differences)} are not" if self.differences else "all are"
        besides = f" and {self.values} settings and buffers" if self.values else ""
        return (
            f"compared {self.compared} states{besides} with what the run recorded when it saved: {wrong} the same{rest}"
        )


class OfRank(NamedTuple):
    """One optimizer of a model-parallel rank in the `torch` format, with its own record."""

    label: str  # the rank's folder, and the optimizer's number if there are several
    plain: Any
    found: list[Fingerprint]

    def checked(self) -> Checked:
        """Compare its files with its record. The label is added to names, as ranks have equal parameter names."""
        own = check(self.plain, self.found)
        differences = [one._replace(parameter=f"{self.label}{one.parameter}") for one in own.differences]
        unchecked = {f"{self.label}{what}": why for what, why in own.unchecked.items()}
        return own._replace(differences=differences, unchecked=unchecked)


def of_torch(path: Path) -> Iterator[OfRank]:
    """The optimizers in a checkpoint of the `torch` format; they have no fingerprints if nothing was recorded.

    Raises:
        BadFileError, NotReadError: a file cannot be read.
    """
    for folder in megatron_torch.folders(path):
        value = torch_file.read(folder / megatron_torch.OPTIMIZER, trust=True).value  # runs no code
        several = value if isinstance(value, list) else [value]
        for number, one in enumerate(several):
            label = "" if folder == path else f"{folder.name}/"
            label += f"{number}/" if len(several) > 1 else ""
            plain = one.get(KEY) if isinstance(one, dict) else None
            of_rank = {name: its for name, its in one.items() if name != KEY} if isinstance(one, dict) else {}
            flats = partial(buckets.in_torch, folder, of_rank)
            yield OfRank(label, plain, list(of_buckets(plain, flats)))


def together(checked: Sequence[Checked]) -> Checked:
    """Merge the results of several comparisons."""
    differences = [one for own in checked for one in own.differences]
    unchecked = {what: why for own in checked for what, why in own.unchecked.items()}
    is_missed, values = any(own.missed for own in checked), sum(own.values for own in checked)
    return Checked(sum(own.compared for own in checked), differences, unchecked, is_missed, values)


def of_buckets(plain: Any, flats: Callable[[], Iterable[buckets.Flat]]) -> Iterator[Fingerprint]:
    """The fingerprints of the parameters in buckets, at the offsets from the record; none if it has no offsets.

    Raises:
        UserError: a file cannot be read.
    """
    try:
        known = buckets.layouts(from_plain(plain).buckets) if plain is not None else {}
    except NotARecord:
        return  # `check` reports it
    if known:
        yield from buckets.fingerprints(known, flats())


def check(plain: Any, found: Iterable[Fingerprint]) -> Checked:
    """Compare the states in the files with the record.

    Args:
        plain: the record in the checkpoint.
        found: the fingerprints of its files; the state "model" is not an optimizer's.
    """
    try:
        record = from_plain(plain)
    except NotARecord as error:
        return Checked(0, [], {"the record": str(error)}, missed=True)
    return _checked(record, {(_recorded_name(one.parameter), one.state): one for one in found})


def _recorded_name(parameter: str) -> str:
    """A parameter's name in a record."""
    return LOCAL_EXPERT.sub(r"deepspeed_experts.global_\1.", CHAINED.sub("", parameter))


def _checked(record: Record, found: Mapping[tuple[str, str], Fingerprint]) -> Checked:
    compared, differences, unchecked = list[tuple[str, str]](), [], dict(record.left_out)
    of_optimizer = {key for key in found if key[1] != "model"}
    known = {parameter for parameter, _ in of_optimizer}
    # An unrecorded name in the files may be a recorded state under another name, which is then not missing.
    all_are_named = bool(of_optimizer) and of_optimizer <= record.states.keys()
    for key, state in record.states.items():
        of_model = found.get((key[0], "model")) if key[1] == FROZEN else _model_as_master(key, state, found)
        its = found.get(key) or of_model
        if its is None and key[1] != FROZEN and (key[0] in known or all_are_named):
            differences.append(Difference(*key, "not in the files"))
        elif its is None:
            unchecked[" ".join(key)] = "it is in no tensor of its own in the files"
        elif its.numel != state.numel:
            what = f"{its.numel:,} elements in the files, {state.numel:,} in the run"
            differences.append(Difference(*key, what))
        else:
            compared.append(key)
            if its.value != state.value:
                differences.append(Difference(*key, _what(record, key, its)))
    for key in found.keys() - record.states.keys():
        if key[1] != "model":
            unchecked[" ".join(key)] = "the run recorded nothing of it"
    is_of_optimizer = any(state not in OF_MODEL for _, state in record.states)
    is_compared = any(state not in OF_MODEL or not is_of_optimizer for _, state in compared)
    return Checked(len(compared), differences, unchecked, bool(record.states) and not (is_compared or differences))


def _model_as_master(
    key: tuple[str, str], state: State, found: Mapping[tuple[str, str], Fingerprint]
) -> Fingerprint | None:
    """The weight of an fp32 model: it is the main parameter as well, and is saved only once."""
    weight = found.get((key[0], "model")) if key[1] == "master" else None
    return weight if weight is not None and weight.value == state.value else None


def _what(record: Record, key: tuple[str, str], its: Fingerprint) -> str:
    if its.value == zeros(its.numel):
        return "all zeros"
    for other, state in record.states.items():
        if other != key and (state.numel, state.value) == (its.numel, its.value):
            return f"those of {' '.join(other)}"
    return "other values"
