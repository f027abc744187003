"""What is to be said of a load: whether the live state is what the record says, and what it looks like where not."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpt_patches.fingerprint.element_hash import zeros
from ckpt_patches.fingerprint.record import RATE, Record, SettingDifference, State
from ckpt_patches.runtime.units import in_bytes

Key = tuple[str, str]  # of a parameter, and of its state
LINES = 12  # of differences that are said one by one
BUFFER = "buffer "  # begins what a buffer is called among what is no parameter
NARROW = ("bfloat16", "float16")

ZEROS, ROUNDED, MOVED, ANOTHERS, SAME_SLICES = "zeros", "rounded", "moved", "another's", "same slices"
MISSING, INCOMPLETE, SHARED, OTHER = "missing", "incomplete", "in another's memory", "other values"


class Total(NamedTuple):
    """What all ranks hold of a state, replicas and all."""

    numel: int
    value: int  # modulo 2^64
    whole: int  # elements of the whole parameter, in this run
    dtype: str


@dataclass(frozen=True)
class Hint:
    """What one rank sees in its elements of a state that is not what it was."""

    numel: int
    zeros: int  # how many elements are
    narrow: bool  # whether all are 16-bit floats
    moved: Sequence[int] = ()  # by how many elements the sample is displaced, where it was found
    slice: int = 0  # what these elements come to, wherever in the parameter they are


class Difference(NamedTuple):
    """A state that is not what it was."""

    parameter: str
    state: str
    kind: str
    what: str


@dataclass(frozen=True)
class Verdict:
    """Of one load."""

    proven: Sequence[Key] = ()
    nbytes: int = 0  # of the proven states, in their own dtypes
    differences: Sequence[Difference] = ()
    settings: Sequence[SettingDifference] = ()
    unproven: Mapping[str, str] = field(default_factory=dict)  # what, and why not
    rates: Sequence[SettingDifference] = ()  # for information: a schedule changes them
    besides: Sequence[str] = ()  # what else is as it was, in words: "2 buffers", "settings"
    recorded: bool = False  # the checkpoint has a record, of a state or one that cannot be read

    @property
    def is_wrong(self) -> bool:
        return bool(self.differences or self.settings)

    @property
    def is_unproven(self) -> bool:
        """Whether nothing came of a record."""
        return self.recorded and not self.proven


class Besides(NamedTuple):
    """What came of a comparison of what is no parameter, on one rank."""

    equal: list[str]
    differences: list[SettingDifference]
    unproven: dict[str, str]  # what, and why


def unequal(record: Record, totals: Mapping[Key, Total]) -> list[Key]:
    """The states that ranks hold and that are not what the record says."""
    return [
        key
        for key, state in record.states.items()
        if key in totals and not _why_not_comparable(state, totals[key]) and not _is(state, totals[key])
    ]


def judge(
    record: Record,
    totals: Mapping[Key, Total],
    *,
    hints: Mapping[Key, Sequence[Hint]],
    settings: Sequence[SettingDifference] = (),
    left_out: Mapping[str, str] | None = None,
    shared: Mapping[Key, Key] | None = None,
    others: Sequence[str] = (),
) -> Verdict:
    """What to say.

    Args:
        record: what the checkpoint says.
        totals: what the ranks hold together.
        hints: of each rank, for the states that `unequal` gives.
        settings: those that differ, rates among them.
        left_out: what of the live state has no fingerprint, and why.
        shared: states that lie in the memory of another one.
        others: what is no parameter and was compared.
    """
    proven, differences, nbytes = [], [], 0
    unproven = {**record.left_out, **(left_out or {})}
    parameters = {parameter for parameter, _ in totals}
    for key, state in record.states.items():
        if key not in totals:
            if key[0] in parameters:
                differences.append(Difference(*key, MISSING, "the run has no such state"))
            elif key[0] not in unproven:
                unproven[key[0]] = "this run has no such parameter"
            continue
        total = totals[key]
        why = _why_not_comparable(state, total)
        if why:
            unproven[f"{key[0]} {key[1]}"] = why
        elif _is(state, total):
            proven.append(key)
            nbytes += state.numel * (2 if total.dtype in NARROW else 4)
        else:
            differences.append(Difference(*key, *_what(record, key, total, hints.get(key, ()))))
    for key in totals.keys() - record.states.keys():
        unproven.setdefault(f"{key[0]} {key[1]}", "the checkpoint's fingerprint does not have it")
    for key, other in (shared or {}).items():
        differences.append(Difference(*key, SHARED, f"in the memory of {other[0]} {other[1]}: a step changes it twice"))
    rates = [one for one in settings if one.setting == RATE]
    wrong = [one for one in settings if one.setting != RATE]
    return Verdict(
        proven, nbytes, differences, wrong, unproven, rates, _besides(record, others), recorded=bool(record.states)
    )


def _besides(record: Record, others: Sequence[str]) -> list[str]:
    buffers = sum(what.startswith(BUFFER) for what in others)
    found = [f"{buffers} buffer{'' if buffers == 1 else 's'}"] if buffers else []
    if record.settings:
        found.append("settings")
    return found + [what for what in others if not what.startswith(BUFFER)]


def _is(state: State, total: Total) -> bool:
    """All replicas are counted, each of which must be the state."""
    replicas, rest = divmod(total.numel, state.numel) if state.numel else (1, total.numel)
    return replicas > 0 and not rest and total.value == replicas * state.value % (1 << 64)


def _why_not_comparable(state: State, total: Total) -> str:
    if total.whole != state.numel:
        return f"{total.whole:,} elements here, {state.numel:,} in the checkpoint: another padding of the vocabulary?"
    if total.dtype in NARROW and state.dtype not in (*NARROW, ""):
        return f"kept in {total.dtype} here, in {state.dtype} when it was saved"
    return ""


def _what(record: Record, key: Key, total: Total, hints: Sequence[Hint]) -> tuple[str, str]:
    """The kind of a difference, and words for it."""
    state = record.states[key]
    numel, none = sum(hint.numel for hint in hints), sum(hint.zeros for hint in hints)
    if total.numel % state.numel:
        return INCOMPLETE, f"{total.numel:,} elements here, of {state.numel:,}"
    empty = sum(hint.zeros == hint.numel for hint in hints)
    if empty:
        return ZEROS, "all zeros" if empty == len(hints) else f"all zeros on {empty} of {len(hints)} ranks"
    if total.numel == state.numel:
        for other, its in record.states.items():
            if other != key and (its.numel, its.value) == (state.numel, total.value):
                return ANOTHERS, f"those of {other[0]} {other[1]}"
    moved = sorted({by for hint in hints for by in hint.moved if by})
    if moved:
        return MOVED, f"a shift: moved by {', '.join(f'{by:,}' for by in moved[:3])} elements"
    repeated = [count for (_, size), count in Counter((h.slice, h.numel) for h in hints).items() if count > 1 and size]
    if repeated and total.numel == state.numel:
        return SAME_SLICES, f"another rank's slice: {max(repeated)} of {len(hints)} ranks hold the same elements"
    if hints and all(hint.narrow for hint in hints) and not none and state.dtype not in NARROW:
        return ROUNDED, "all are 16-bit floats: rounded"
    if none and state.value != zeros(state.numel):
        return OTHER, f"other values, {none:,} of {numel:,} zeros"
    return OTHER, "other values"


def sentences(verdict: Verdict) -> list[str]:
    """Lines for a log; the first says all in one."""
    if verdict.is_wrong:
        lines = [*map(_line, verdict.differences), *map(_line, verdict.settings)]
        return [_headline(verdict), *_shortened(lines), *_of_rates(verdict.rates)]
    parameters = len({parameter for parameter, _ in verdict.proven})
    rest = f"; {len(verdict.unproven)} not proven" if verdict.unproven else ""
    if not verdict.proven:
        headline = "fingerprint: nothing is proven of this resume"
    else:
        size = in_bytes(verdict.nbytes)
        what = ", ".join([f"{parameters} parameters", f"{len(verdict.proven)} states", *verdict.besides, size])
        headline = f"resume proven: {what}{rest}"
    unproven = _shortened([f"  not proven: {what}: {why}" for what, why in verdict.unproven.items()])
    return [headline, *unproven, *_of_rates(verdict.rates)]


def besides_sentences(
    equal: Sequence[str], differences: Sequence[SettingDifference], unproven: Mapping[str, str]
) -> list[str]:
    """As `sentences`, of what is no parameter."""
    left = _shortened([f"  not proven: {what}: {why}" for what, why in unproven.items()])
    if differences:
        headline = f"fingerprint: the run after the load is not what was saved: values that differ: {len(differences)}"
        return [headline, *_shortened(list(map(_line, differences))), *left]
    headline = f"resume proven: {', '.join(equal)}" if equal else "fingerprint: nothing is proven of the run's state"
    return [headline, *left] if equal or unproven else []


def _of_rates(rates: Sequence[SettingDifference]) -> list[str]:
    counted = Counter((one.saved, one.found) for one in rates)
    return [f"  rate: {found} now, {saved} when saved: {n} parameters" for (saved, found), n in counted.most_common(3)]


def _headline(verdict: Verdict) -> str:
    parameters = {one.parameter for one in verdict.differences} | {one.parameter for one in verdict.settings}
    kinds = Counter(one.kind for one in verdict.differences)
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    states = f"{len(verdict.differences)} states{f' ({counted})' if counted else ''}"
    return (
        f"fingerprint: the state after the load is not what was saved: {states} and {len(verdict.settings)} settings "
        f"of {len(parameters)} parameters differ, {len(verdict.proven)} states are equal"
    )


def _line(one: Difference | SettingDifference) -> str:
    if isinstance(one, Difference):
        return f"  {one.parameter} {one.state}: {one.what}"
    return f"  {one.parameter}: {one.setting} {one.found}, saved as {one.saved}"


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - LINES
    return lines if more <= 0 else [*lines[:LINES], f"  and {more:,} more"]
