"""The record of a checkpoint's own state: plain numbers and strings, stored with the common (not sharded) state."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FORMAT = 1
MOST = 1 << 48  # elements of a tensor
STEP = "global_steps"  # of the run; detects a record that a client saved again
OPTIONAL = frozenset(("momentum", "dampening", "nesterov", "amsgrad"))  # off in an optimizer that does not have them
# A parameter's settings that must be equal, and the rate, which is for information: a schedule changes it.
SETTINGS = ("weight_decay", "betas", "eps", "step", *sorted(OPTIONAL))
RATE = "lr"
NOT_ALIKE = "not the same on all ranks that saved"
STATE = "state "  # prefix of the name of a setting that is a number among a parameter's states
BUFFER = "buffer "  # prefix of a buffer's name among the non-parameter values

Key = tuple[str, str]  # names of a parameter and its state
Settings = Mapping[str, Any]


class State(NamedTuple):
    """One state of one parameter, or its sums over replicas of it."""

    numel: int
    value: int  # modulo 2^64, see element_hash
    whole: int  # elements of the full parameter: more if some have no such state, as frozen layers in a stack
    dtype: str = ""  # in the run; unknown of files


@dataclass(frozen=True)
class Record:
    """The record of a complete job's state."""

    states: Mapping[Key, State]
    settings: Mapping[str, Settings] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    buckets: Mapping[str, Any] = field(default_factory=dict)  # parameter offsets in Megatron's buckets, see `Layout`
    others: Mapping[str, Settings] = field(default_factory=dict)  # values that are not a parameter's
    # States of which not every rank with the parameter had its part; None: not recorded
    partial: frozenset[Key] | None = frozenset()
    has_all_experts: bool = True  # version 0.2 recorded those of the first rank alone, without ZeRO

    def as_plain(self) -> dict[str, Any]:
        """The form for a checkpoint."""
        states: dict[str, dict[str, list[Any]]] = {}
        for (parameter, name), state in sorted(self.states.items()):
            row = [state.numel, state.value, state.dtype, {}]  # releases before had a sample of elements there
            states.setdefault(parameter, {})[name] = row
        return {
            "format": FORMAT,
            "states": states,
            "settings": {what: dict(its) for what, its in sorted(self.settings.items())},
            "left_out": dict(self.left_out),
            "buckets": dict(self.buckets),
            "others": {what: dict(its) for what, its in sorted(self.others.items())},
            "partial": sorted(map(list, self.partial or ())),
            "sizes": {key[0]: its.whole for key, its in self.states.items() if its.whole != its.numel},
        }


def of_step(plain: Any, step: Any) -> Any:
    """The record in a checkpoint of that step.

    A record of another step was saved again by a run without fingerprints. It is replaced by an empty one.
    """
    if not isinstance(plain, dict) or plain.get(STEP, step) == step:
        return plain
    why = f"the record is of step {plain[STEP]}, and the checkpoint of step {step}: its run recorded nothing"
    return Record({}, left_out={"the checkpoint": why}).as_plain()


class NotARecord(Exception):
    """The record in a checkpoint has another format, or is damaged."""


def from_plain(value: Any) -> Record:
    """The record from a result of `as_plain`.

    Raises:
        NotARecord: the value has another form.
    """
    try:
        if value["format"] != FORMAT:
            raise NotARecord(f"expected format {FORMAT}, found {value['format']}: it is of another release of ours")
        sizes = {str(parameter): count(numel) for parameter, numel in value.get("sizes", {}).items()}
        states = {
            (str(parameter), str(name)): State(count(n), int(sum_), sizes.get(parameter, count(n)), str(dtype))
            for parameter, of_one in value["states"].items()
            for name, (n, sum_, dtype, *_) in of_one.items()
        }
        settings, others = (
            {str(what): {str(name): its[name] for name in its} for what, its in value.get(part, {}).items()}
            for part in ("settings", "others")
        )
        left_out = {str(what): str(why) for what, why in value["left_out"].items()}
        partial = frozenset((str(p), str(s)) for p, s in value["partial"]) if "partial" in value else None
        return Record(states, settings, left_out, dict(value["buckets"]), others, partial, "sizes" in value)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise NotARecord(f"expected a record of fingerprints, found {type(value).__name__} ({error!r})") from None


def count(value: Any) -> int:
    """A number of elements, or a place, from a record.

    Raises:
        ValueError, TypeError: it is none.
    """
    if not 0 <= int(value) < MOST:
        raise ValueError(f"{value} elements")
    return int(value)


def digest(value: Any, size: int = 16) -> str:
    """A digest, of `size` bytes, of a value's text."""
    return hashlib.blake2b(repr(value).encode(), digest_size=size).hexdigest()


def merged(records: Iterable[Record]) -> Record:
    """All ranks' settings and other values, without states."""
    settings: dict[str, Settings] = {}
    left_out: dict[str, str] = {}
    buckets: dict[str, Any] = {}
    others: dict[str, Settings] = {}
    for record in records:
        for parameter, its in record.settings.items():
            add_settings(settings, left_out, parameter, its)
        for what, its in record.others.items():
            if others.setdefault(what, its) != its:
                left_out[what] = NOT_ALIKE
        left_out.update(record.left_out)
        buckets.update(record.buckets)
    others = {what: its for what, its in others.items() if what not in left_out}
    return Record({}, settings, left_out, buckets, others)


def settings_of(group: Mapping[str, Any], states: Mapping[str, Any]) -> Settings:
    """The settings of a parameter, from its group; its step may be among its states."""
    found = {name: group[name] for name in (*SETTINGS, RATE) if name in group}
    step = states.get("step", found.get("step"))
    if step is not None:
        found["step"] = int(step) if type(step) is int or float(step).is_integer() else float(step)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def add_settings(known: dict[str, Settings], left_out: dict[str, str], parameter: str, its: Settings) -> None:
    """Add the settings of one part of a parameter; layers stacked into one parameter may differ in them."""
    before = known.setdefault(parameter, its)
    differ = {name for name in before.keys() & its.keys() if not same(before[name], its[name])}
    if differ:
        known[parameter] = {name: value for name, value in before.items() if name not in differ}
        left_out.update({f"{parameter} {name}": "its parts differ in it" for name in differ - {RATE}})


class SettingDifference(NamedTuple):
    """A setting that differs from the saved one."""

    parameter: str
    setting: str
    saved: Any
    found: Any


def setting_differences(
    saved: Mapping[str, Settings], found: Mapping[str, Settings], names: Iterable[str] | None = None
) -> list[SettingDifference]:
    """The differences in the settings of what both have; a lost one is a difference.

    Args:
        saved, found: settings by parameter, or other values by what has them.
        names: those that are compared; None for all, also those that only `found` has.
    """
    known = None if names is None else set(names)
    return [
        SettingDifference(what, name, its.get(name), found[what].get(name))
        for what, its in sorted(saved.items())
        if what in found
        for name in sorted(its.keys() | found[what].keys() if known is None else (its.keys() | OPTIONAL) & known)
        if not same(_value(its, name), _value(found[what], name))
    ]


def _value(its: Settings, name: str) -> Any:
    return its.get(name, False if name in OPTIONAL else None)


def plain_values(state: Mapping[Any, Any]) -> Settings:
    """The values in a scheduler's state that are numbers, strings or lists of these; the rest is code."""
    return {str(name): value for name, value in state.items() if is_plain(value)}


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string, None, or a list of these."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def same(one: Any, other: Any) -> bool:
    """Whether two settings are equal. Formats store pairs as lists; NaN equals NaN."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(a == b or (a != a and b != b) for a, b in zip(one, other, strict=True))
    return bool(one == other or (one != one and other != other))
