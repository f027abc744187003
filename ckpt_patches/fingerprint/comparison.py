"""Compare states with a record: those of a running job, or those in the files of a checkpoint; and two checkpoints."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt_patches.fingerprint.element_hash import MODULUS, zeros
from ckpt_patches.fingerprint.record import (
    BUFFER,
    NOT_ALIKE,
    Key,
    NotARecord,
    Record,
    SettingDifference,
    State,
    from_plain,
)
from ckpt_patches.fingerprint.states import FROZEN, OF_BUFFER, Fingerprint
from ckpt_patches.formats.megatron_names import is_bucket

CHAINED = re.compile(r"^chained_\d+\.")  # prefix of tensor names if there are several optimizers
# An expert by its number on its rank; with a single expert-parallel rank, this is the global number.
LOCAL_EXPERT = re.compile(r"\bdeepspeed_experts\.(\d+)\.")
EXPERT = "deepspeed_experts.global_"  # in the names of its parameters
OF_MODEL = ("master", "weight", FROZEN, OF_BUFFER)  # states that are parameters themselves
AGAIN = "master_param"  # main parameters, which the buckets of a hybrid optimizer have a second time
NOWHERE = "this run has nothing of it"  # of a value that is no parameter's
NO_TENSOR = "it is in no tensor of its own in the files"
NOT_RECORDED = "the run recorded nothing of it"
NO_PLACES = "a bucket, and where parameters begin in it is not in the checkpoint (CKPT_PATCHES_FINGERPRINT=1 saves it)"
LINES = 12  # maximum number of differences that are listed
BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "uint8": 8}
# Kinds of differences
ZEROS, ANOTHERS, MISSING, NOT_SAVED, INCOMPLETE = "zeros", "another's", "missing", "not saved", "incomplete"
SHARED, OTHER = "in another's memory", "other values"


class Difference(NamedTuple):
    """A state that differs from the saved one."""

    parameter: str
    state: str
    kind: str
    what: str


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison."""

    verified: Sequence[Key] = ()
    differences: Sequence[Difference] = ()
    not_verified: Mapping[str, str] = field(default_factory=dict)  # by name, the reason
    missed: bool = False  # whether no state of an optimizer could be compared, though there is a record
    settings: Sequence[SettingDifference] = ()
    rates: Sequence[SettingDifference] = ()  # for information: a schedule changes them
    besides: Sequence[str] = ()  # other equal values, as text: "2 buffers", "settings"

    @property
    def is_wrong(self) -> bool:
        return bool(self.differences or self.settings)

    @property
    def is_equal(self) -> bool:
        """Whether there is no difference, and something was compared."""
        return not (self.is_wrong or self.missed)

    def sentence(self) -> str:
        """The result in one line."""
        states = sum(key[1] != OF_BUFFER for key in self.verified)
        what = ", ".join([f"{states} states"] * bool(states) + [*self.besides])
        rest = f"; {len(self.not_verified)} not verified" if self.not_verified else ""
        if self.is_wrong:
            kinds = Counter([*(one.kind for one in self.differences), *("settings" for _ in self.settings)])
            counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
            return f"differs: {counted}; {states} states verified{rest}"
        if not what:
            return f"not verified: nothing could be compared{rest}"
        return f"not verified; {what} verified{rest}" if self.missed else f"verified: {what}{rest}"

    def lines(self) -> list[str]:
        """The lines for a log; the first one is a summary."""
        rates = Counter((one.saved, one.found) for one in self.rates)
        return [
            f"resume {self.sentence()}",
            *_shortened(
                [
                    *(f"  {one.parameter} {one.state}: {one.what}" for one in self.differences),
                    *(f"  {one.parameter}: {one.setting} {one.found}, saved as {one.saved}" for one in self.settings),
                ]
            ),
            *_shortened([f"  not verified: {what}: {why}" for what, why in self.not_verified.items()]),
            *(f"  rate: {new} now, {old} when saved: {n} parameters" for (old, new), n in rates.most_common(3)),
        ]


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - LINES
    return lines if more <= 0 else [*lines[:LINES], f"  and {more:,} more"]


def judge(
    record: Record,
    found: Mapping[Key, State],
    left_out: Mapping[str, str],
    *,
    in_files: bool = False,
    here: str = "the run",
    saved: str = "the checkpoint's fingerprint",
) -> Verdict:
    """Compare states with those of a record.

    Args:
        record: of the checkpoint.
        found: the sums over all ranks and replicas of the run, or the states in the files.
        left_out: what has no fingerprint there, and the reasons.
        in_files: whether the states are of files. Only the names in `left_out` can be missing there. In a run, what is
            of no parameter, such as an optimizer that is not known, may have those of parameters with no other states.
        here, saved: names of the two sides, for messages.
    """
    verified, differences = [], []
    not_verified = {**record.left_out, **left_out}
    held, saved_ones = ({parameter for parameter, _ in states} for states in (found, record.states))

    def excuse(key: Key, left: Mapping[str, str], own: set[str]) -> str | None:
        """Why a side may lack a state: it is, or may be in, what that side could not read; None if it does lack it."""
        names = {what for what, why in left.items() if why not in (NOT_ALIKE, NOWHERE)}
        if key[0] in names or " ".join(key) in names:
            return ""
        of_none = (
            what for what in names if not what.startswith(BUFFER) and what.split(" ")[0] not in held | saved_ones
        )
        return None if in_files or key[0] in own else next((f"it may be in {what}" for what in sorted(of_none)), None)

    for key, state in record.states.items():
        own = found.get(key)
        if own is None:
            if (why := excuse(key, left_out, held)) is None:
                what = "state" if key[0] in held else "parameter"
                differences.append(Difference(*key, MISSING, f"{here} has no such {what}"))
            elif why and found:
                not_verified[" ".join(key)] = why
        elif not in_files and (why := _why_not_comparable(state, own)):
            not_verified[" ".join(key)] = why
        elif copies := _lacking(record, found, key):
            differences.append(Difference(*key, MISSING, f"{copies} of the parameter's copies have it"))
        elif kind := _kind(record, key, own):
            differences.append(Difference(*key, *kind))
        else:
            verified.append(key)
    kinds = {state for _, state in record.states}
    for key in sorted(found.keys() - record.states.keys()):
        why = _why_not_recorded(record, key, kinds) or excuse(key, record.left_out, saved_ones)
        if why is None:
            differences.append(Difference(*key, NOT_SAVED, f"{saved} does not have it"))
        elif why and record.states:
            not_verified[" ".join(key)] = why
    has_optimizer = any(state not in OF_MODEL for state in kinds)
    is_compared = any(state not in OF_MODEL or not has_optimizer for _, state in verified)
    return Verdict(verified, differences, not_verified, bool(kinds) and not (is_compared or differences))


def _kind(record: Record, key: Key, own: State) -> tuple[str, str] | None:
    """The kind of a difference, and its description; None if each replica equals the recorded state."""
    state = record.states[key]
    copies, rest = divmod(own.numel, state.numel) if state.numel else (1, own.numel)
    if rest or not copies:
        return INCOMPLETE, f"{own.numel:,} elements here, of {state.numel:,}"
    if own.value == copies * state.value % MODULUS:
        return None
    if own.value == copies * zeros(state.numel) % MODULUS:
        return ZEROS, "all zeros"
    for other, its in record.states.items():
        if its.numel == state.numel and own.value == copies * its.value % MODULUS:
            return ANOTHERS, f"those of {other[0]} {other[1]}"
    return OTHER, "other values"


def _lacking(record: Record, found: Mapping[Key, State], key: Key) -> str:
    """How many ranks with a parameter have a state that all of them had; empty if as many."""
    own = next((key[0], name) for name in ("master", "weight", "") if not name or (key[0], name) in found)
    if record.partial is None or key in record.partial or own not in found or own not in record.states:
        return ""
    if record.states[own].numel != record.states[key].numel:  # it can be divided among ranks in another way
        return ""
    copies, expected = (found[one].numel // max(record.states[one].numel, 1) for one in (key, own))
    return f"{copies} of {expected}" if 0 < copies < expected else ""


def _why_not_comparable(state: State, own: State) -> str:
    if own.whole != state.whole:
        return f"{own.whole:,} elements here, {state.whole:,} in the checkpoint: another padding of the vocabulary?"
    if BITS.get(own.dtype, 32) < BITS.get(state.dtype, 0):
        return f"kept in {own.dtype} here, in {state.dtype} when it was saved"
    return ""


def _why_not_recorded(record: Record, key: Key, kinds: set[str]) -> str:
    """Why version 0.2 has not recorded a state; empty if it has recorded its kind."""
    if key[1] in (FROZEN, OF_BUFFER) and key[1] not in kinds:
        return "the checkpoint's fingerprint has none of its kind"
    if key[1] == OF_BUFFER and f"{BUFFER}{key[0]}" in record.others:  # a digest of integers
        return "the checkpoint's fingerprint has it in another form"
    if EXPERT in key[0] and not record.has_all_experts:
        return "version 0.2 recorded the experts of the first rank alone"
    return ""


# Files


def of_two(
    one: Iterable[Fingerprint],
    other: Iterable[Fingerprint],
    unread: Mapping[str, str],
    unread_of_other: Mapping[str, str],
) -> Verdict:
    """Compare two checkpoints.

    Args:
        one, other: the fingerprints of their states.
        unread, unread_of_other: what has no fingerprint in each, and the reasons.
    """
    first, second = ({_key_of_two(key): its for key, its in _states(own).items()} for own in (one, other))
    keys = first.keys() | second.keys()
    read = {" ".join(key) for key in keys} | {parameter for parameter, state in keys if state == "model"}
    alone = [
        Difference(name, "", MISSING, f"in the {'first' if name in unread else 'second'} one alone")
        for name in sorted(unread.keys() ^ unread_of_other.keys())
        if name not in read
    ]
    record = Record(first, left_out=unread)
    verdict = judge(record, second, unread_of_other, in_files=True, here="the second one", saved="the first one")
    differences = [*verdict.differences, *alone]
    in_buckets = {one.parameter: NO_PLACES for one in differences if is_bucket(one.parameter)}
    if in_buckets:  # of another padding, or with other places; what one side alone has may be in them
        absent = (MISSING, NOT_SAVED)
        differences = [one for one in differences if one.kind not in absent and one.parameter not in in_buckets]
    is_missed = not verdict.verified or bool(in_buckets)
    return Verdict(verdict.verified, differences, {**verdict.not_verified, **in_buckets}, is_missed)


def with_record(plain: Any, fingerprints: Iterable[Fingerprint], unread: Mapping[str, str]) -> Verdict:
    """Compare the states in the files with the record.

    Args:
        plain: the record in the checkpoint.
        fingerprints: of its files; the state "model" is not an optimizer's.
        unread: what has no fingerprint, and the reasons.
    """
    try:
        record = from_plain(plain)
    except NotARecord as error:
        return Verdict(not_verified={"the record": str(error)}, missed=True)
    read = _states(own for own in fingerprints if own.state != "step")
    found = {(recorded_name(name), state): own for (name, state), own in read.items()}
    named = _as_recorded(record, found)
    known = {" ".join(key) for key in record.states}
    left_out = {what: why for what, why in unread.items() if what in known}
    left_out |= _unnamed(record, found, named)
    return judge(record, named, left_out, in_files=True, here="the checkpoint")


def _states(fingerprints: Iterable[Fingerprint]) -> dict[Key, State]:
    return {(one.parameter, one.state): State(one.numel, one.value, one.numel) for one in fingerprints}


def _key_of_two(key: Key) -> Key:
    return key if is_bucket(key[0]) else (recorded_name(key[0]), key[1])


def recorded_name(parameter: str) -> str:
    """A parameter's name in a record."""
    return LOCAL_EXPERT.sub(r"deepspeed_experts.global_\1.", CHAINED.sub("", parameter))


def _as_recorded(record: Record, found: Mapping[Key, State]) -> dict[Key, State]:
    """The states in the files whose parameters the record has.

    A weight of an fp32 model is the main parameter as well, and a frozen one its only state; each is saved once.
    """
    parameters = {parameter for parameter, _ in record.states}
    named = {key: one for key, one in found.items() if key[0] in parameters and key[1] != "model"}
    for key in [key for key in named if key[1] == AGAIN and key not in record.states]:
        again, main = named.pop(key), record.states.get((key[0], "master"))
        if main is None or (again.numel, again.value) != (main.numel, main.value):
            named[key[0], "master"] = again  # of the two, the one that is not as recorded
    for key, state in record.states.items():
        weight = found.get((key[0], "model"))
        if key[1] == FROZEN and (key[0], "master") not in record.states:  # a conversion writes it as a main parameter
            weight = named.pop((key[0], "master"), weight)
        if key in named or weight is None:
            continue
        if key[1] in (FROZEN, OF_BUFFER) or (key[1] == "master" and weight.value == state.value):
            named[key] = weight
    return named


def _unnamed(record: Record, found: Mapping[Key, State], named: Mapping[Key, State]) -> dict[str, str]:
    """The states that the record and the files may have under different names, and why they are not compared.

    A recorded state is missing if the files have another one of its parameter, or if the record has all of their
    names; it differs if those of its size in the files all have other values.
    """
    of_optimizer = {key for key in found if key[1] != "model"}
    others = {key: found[key] for key in of_optimizer - record.states.keys()}
    known = {parameter for parameter, _ in of_optimizer}
    all_are_named = bool(of_optimizer) and not others
    parameters = {parameter for parameter, _ in record.states}
    unnamed = {" ".join(key): NOT_RECORDED for key in others if key[0] not in parameters}
    for key, state in record.states.items():
        if key in named or (key[1] not in (FROZEN, OF_BUFFER) and (key[0] in known or all_are_named)):
            continue
        alike = [one.value for other, one in others.items() if other[1] == key[1] and one.numel == state.numel]
        if not alike or state.value in alike:
            unnamed[" ".join(key)] = NO_TENSOR
    return unnamed
