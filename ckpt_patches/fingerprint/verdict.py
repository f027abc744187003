"""The verdict on a load: whether the live state equals the record, and the likely kind of each difference."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpt_patches.fingerprint.element_hash import MODULUS, zeros
from ckpt_patches.fingerprint.record import NOT_ALIKE, RATE, Record, SettingDifference, State
from ckpt_patches.fingerprint.states import FROZEN, OF_BUFFER
from ckpt_patches.runtime.units import in_bytes

Key = tuple[str, str]  # names of a parameter and its state
VERIFIED, DIFFERS, NOT_VERIFIED = "resume verified: ", "resume differs: ", "resume not verified"  # begin a log line
EXPERT = "deepspeed_experts.global_"  # in the names of its parameters
LINES = 12  # maximum number of differences that are listed
NOWHERE = "this run has nothing of it"  # of a value that is no parameter's
BUFFER = "buffer "  # prefix of a buffer's name among the non-parameter values
NARROW = ("bfloat16", "float16")
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "uint8": 8}

ZEROS, ROUNDED, ANOTHERS = "zeros", "rounded", "another's"
MISSING, NOT_SAVED, INCOMPLETE = "missing", "not saved", "incomplete"
SHARED, SETTING, OTHER = "in another's memory", "setting", "other values"


@dataclass
class Total:
    """The total of a state over one rank, or over all ranks, including replicas."""

    numel: int = 0
    value: int = 0  # modulo 2^64
    whole: int = 0  # elements of the full parameter in this run
    dtype: str = ""

    def add(self, numel: int, value: int) -> None:
        self.numel, self.value = self.numel + numel, (self.value + value) % MODULUS

    def as_state(self) -> State:
        return State(self.numel, self.value, self.dtype)


@dataclass(frozen=True)
class Hint:
    """One rank's observations on its elements of a state that differs from the saved one."""

    numel: int
    zeros: int  # number of zero elements
    narrow: bool  # whether all are 16-bit floats


class Difference(NamedTuple):
    """A state that differs from the saved one."""

    parameter: str
    state: str
    kind: str
    what: str


@dataclass(frozen=True)
class Verdict:
    """The verdict on one load."""

    verified: Sequence[Key] = ()
    nbytes: int = 0  # bytes of the verified states in their own dtypes
    differences: Sequence[Difference] = ()
    settings: Sequence[SettingDifference] = ()
    not_verified: Mapping[str, str] = field(default_factory=dict)  # by name, the reason
    rates: Sequence[SettingDifference] = ()  # for information: a schedule changes them
    besides: Sequence[str] = ()  # other equal values, as text: "2 buffers", "settings"
    recorded: bool = False  # whether the checkpoint has a record with states, or an unreadable one

    @property
    def is_wrong(self) -> bool:
        return bool(self.differences or self.settings)

    @property
    def nothing_is_verified(self) -> bool:
        """Whether there is a record, but nothing is verified."""
        return self.recorded and not self.verified


class Besides(NamedTuple):
    """The result of comparing non-parameter values on one rank."""

    equal: list[str]
    differences: list[SettingDifference]
    not_verified: dict[str, str]  # by name, the reason


def unequal(record: Record, totals: Mapping[Key, Total]) -> list[Key]:
    """The states that ranks hold and that differ from the record."""
    return [
        key
        for key, state in record.states.items()
        if key in totals and not _why_not_comparable(record, key, totals[key]) and not _is(state, totals[key])
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
    lacking: Mapping[Key, int] | None = None,
    here: str = "the run",
    saved: str = "the checkpoint's fingerprint",
    general: Callable[[str], bool] | None = None,
) -> Verdict:
    """The verdict from a record and the ranks' observations, or the files' contents.

    Args:
        record: of the checkpoint.
        totals: the totals over all ranks.
        hints: those of each rank, for the states that `unequal` returns.
        settings: those that differ, including rates.
        left_out: live state without a fingerprint, and the reasons.
        shared: states that share memory with another one.
        others: names of the compared non-parameter values.
        lacking: on how many ranks with the parameter a state is missing that all of them had.
        here, saved: names of the two sides, for messages.
        general: whether what is left out may have had any state; None: whether it is no parameter's.
    """
    verified, differences, nbytes = [], [], 0
    not_verified = {**record.left_out, **(left_out or {})}
    held = {parameter for parameter, _ in totals}
    parameters = held | {parameter for parameter, _ in record.states}

    def of_no_parameter(what: str) -> bool:
        return not what.startswith(BUFFER) and what.split(" ")[0] not in parameters

    for key, state in record.states.items():
        if key not in totals:
            if not _explained(key, left_out or {}, general or of_no_parameter):
                what = "state" if key[0] in held else "parameter"
                differences.append(Difference(*key, MISSING, f"{here} has no such {what}"))
            continue
        total = totals[key]
        why = _why_not_comparable(record, key, total)
        if why:
            not_verified[f"{key[0]} {key[1]}"] = why
        elif lacking and key in lacking:
            ranks = f"{lacking[key]} rank{'' if lacking[key] == 1 else 's'}"
            differences.append(Difference(*key, MISSING, f"missing on {ranks} with the parameter"))
        elif _is(state, total):
            verified.append(key)
            nbytes += state.numel * (2 if total.dtype in NARROW else 4)
        else:
            differences.append(Difference(*key, *_what(record, key, total, hints.get(key, ()))))
    kinds = {state for _, state in record.states}
    for key in sorted(totals.keys() - record.states.keys()):
        if key[1] in (FROZEN, OF_BUFFER) and key[1] not in kinds:  # version 0.2.0 recorded none
            not_verified[" ".join(key)] = "the checkpoint's fingerprint has none of its kind"
        elif EXPERT in key[0] and not record.has_all_experts:
            not_verified[" ".join(key)] = "version 0.2 recorded the experts of the first rank alone"
        elif not _explained(key, record.left_out, general or of_no_parameter):
            differences.append(Difference(*key, NOT_SAVED, f"{saved} does not have it"))
    for key, other in (shared or {}).items():
        differences.append(Difference(*key, SHARED, f"in the memory of {other[0]} {other[1]}: a step changes it twice"))
    rates = [one for one in settings if one.setting == RATE]
    wrong = [one for one in settings if one.setting != RATE]
    return Verdict(
        verified,
        nbytes,
        differences,
        wrong,
        not_verified,
        rates,
        _besides(record, others, verified),
        recorded=bool(record.states),
    )


def _explained(key: Key, left_out: Mapping[str, str], general: Callable[[str], bool]) -> bool:
    """Whether a state can be missing because one side could not read it, or what may have had it."""
    of_others = {what for what, why in left_out.items() if why in (NOT_ALIKE, NOWHERE)}
    return any(what in (key[0], " ".join(key)) or general(what) for what in left_out.keys() - of_others)


def _besides(record: Record, others: Sequence[str], verified: Sequence[Key]) -> list[str]:
    buffers = sum(what.startswith(BUFFER) for what in others) + sum(state == OF_BUFFER for _, state in verified)
    found = [f"{buffers} buffer{'' if buffers == 1 else 's'}"] if buffers else []
    if record.settings:
        found.append("settings")
    return found + [what for what in others if not what.startswith(BUFFER)]


def _is(state: State, total: Total) -> bool:
    """Whether a total equals a state. The total counts all replicas, and each replica must equal the state."""
    replicas, rest = divmod(total.numel, state.numel) if state.numel else (1, total.numel)
    return replicas > 0 and not rest and total.value == replicas * state.value % (1 << 64)


def _why_not_comparable(record: Record, key: Key, total: Total) -> str:
    state = record.states[key]
    whole = record.sizes.get(key[0], state.numel)
    if total.whole != whole:
        return f"{total.whole:,} elements here, {whole:,} in the checkpoint: another padding of the vocabulary?"
    if BITS.get(total.dtype, 32) < BITS.get(state.dtype, 0):
        return f"kept in {total.dtype} here, in {state.dtype} when it was saved"
    return ""


def _what(record: Record, key: Key, total: Total, hints: Sequence[Hint]) -> tuple[str, str]:
    """The kind of a difference, and its description."""
    state = record.states[key]
    numel, none = sum(hint.numel for hint in hints), sum(hint.zeros for hint in hints)
    if not state.numel or total.numel % state.numel:
        return INCOMPLETE, f"{total.numel:,} elements here, of {state.numel:,}"
    if total.numel == state.numel and total.value == zeros(total.numel):
        return ZEROS, "all zeros"
    empty = sum(hint.zeros == hint.numel for hint in hints)
    if empty:
        return ZEROS, "all zeros" if empty == len(hints) else f"all zeros on {empty} of {len(hints)} ranks"
    if total.numel == state.numel:
        for other, its in record.states.items():
            if other != key and (its.numel, its.value) == (state.numel, total.value):
                return ANOTHERS, f"those of {other[0]} {other[1]}"
    if hints and all(hint.narrow for hint in hints) and not none and state.dtype not in NARROW:
        return ROUNDED, "all are 16-bit floats: rounded"
    if none and state.value != zeros(state.numel):
        return OTHER, f"other values, {none:,} of {numel:,} zeros"
    return OTHER, "other values"


def sentences(verdict: Verdict) -> list[str]:
    """The lines for a log; the first one is a summary."""
    if verdict.is_wrong:
        lines = [*map(_line, verdict.differences), *map(_line, verdict.settings)]
        return [_headline(verdict), *_shortened(lines), *_of_rates(verdict.rates)]
    states = [key for key in verdict.verified if key[1] != OF_BUFFER]
    parameters = len({parameter for parameter, _ in states})
    rest = f"; {len(verdict.not_verified)} not verified" if verdict.not_verified else ""
    if not verdict.verified:
        headline = NOT_VERIFIED
    else:
        size = in_bytes(verdict.nbytes)
        what = ", ".join([f"{parameters} parameters", f"{len(states)} states", *verdict.besides, size])
        headline = f"{VERIFIED}{what}{rest}"
    not_verified = _shortened([f"  not verified: {what}: {why}" for what, why in verdict.not_verified.items()])
    return [headline, *not_verified, *_of_rates(verdict.rates)]


def besides_sentences(
    equal: Sequence[str], differences: Sequence[SettingDifference], not_verified: Mapping[str, str]
) -> list[str]:
    """The lines for a log, for non-parameter values."""
    left = _shortened([f"  not verified: {what}: {why}" for what, why in not_verified.items()])
    if differences:
        values = f"{len(differences)} value{'' if len(differences) == 1 else 's'} besides the optimizer"
        return [f"{DIFFERS}{values}", *_shortened(list(map(_line, differences))), *left]
    headline = f"{VERIFIED}{', '.join(equal)}" if equal else NOT_VERIFIED
    return [headline, *left] if equal or not_verified else []


def _of_rates(rates: Sequence[SettingDifference]) -> list[str]:
    counted = Counter((one.saved, one.found) for one in rates)
    return [f"  rate: {found} now, {saved} when saved: {n} parameters" for (saved, found), n in counted.most_common(3)]


def _headline(verdict: Verdict) -> str:
    parameters = {one.parameter for one in verdict.differences} | {one.parameter for one in verdict.settings}
    kinds = Counter(one.kind for one in verdict.differences)
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    states = f"{len(verdict.differences)} states{f' ({counted})' if counted else ''}"
    return (
        f"{DIFFERS}{states} and {len(verdict.settings)} settings of {len(parameters)} parameters; "
        f"{len(verdict.verified)} states verified"
    )


def _line(one: Difference | SettingDifference) -> str:
    if isinstance(one, Difference):
        return f"  {one.parameter} {one.state}: {one.what}"
    return f"  {one.parameter}: {one.setting} {one.found}, saved as {one.saved}"


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - LINES
    return lines if more <= 0 else [*lines[:LINES], f"  and {more:,} more"]
