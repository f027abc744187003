"""The record of a checkpoint's own state: plain numbers and strings, stored with the common (not sharded) state."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FORMAT = 1
STEP = "global_steps"  # of the run; detects a record that a client saved again
# A parameter's settings that must be equal, and the rate, which is for information: a schedule changes it.
SETTINGS = ("weight_decay", "betas", "eps", "step")
RATE = "lr"
NOT_ALIKE = "not the same on all ranks that saved"
STATE = "state "  # prefix of the name of a setting that is a number among a parameter's states

Settings = Mapping[str, Any]


class State(NamedTuple):
    """One state of one parameter."""

    numel: int
    value: int  # 64 bits, see element_hash
    dtype: str = "float32"  # dtype in the run

    def added_to(self, before: "State | None") -> "State":
        """The sum with the elements before these, if any."""
        if before is None:
            return self
        value = (before.value + self.value) % (1 << 64)
        return State(before.numel + self.numel, value, self.dtype)


@dataclass(frozen=True)
class Record:
    """The record of a complete job's state."""

    states: Mapping[tuple[str, str], State]
    settings: Mapping[str, Settings] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    buckets: Mapping[str, Any] = field(default_factory=dict)  # parameter offsets in Megatron's buckets, see `Layout`
    others: Mapping[str, Settings] = field(default_factory=dict)  # values that are not a parameter's
    # States of which a rank had the parameter and not the state; None: not recorded
    partial: frozenset[tuple[str, str]] | None = None
    # Elements of parameters of which only some have states, as those of a stack of layers with frozen ones
    sizes: Mapping[str, int] = field(default_factory=dict)
    has_all_experts: bool = True  # version 0.2 recorded those of the first rank alone, without ZeRO

    def as_plain(self) -> dict[str, Any]:
        """The form for a checkpoint."""
        states: dict[str, dict[str, list[Any]]] = {}
        for (parameter, name), state in sorted(self.states.items()):
            states.setdefault(parameter, {})[name] = [*state, {}]  # releases before had a sample of elements there
        settings = {parameter: dict(its) for parameter, its in sorted(self.settings.items())}
        of_all = {"settings": settings, "left_out": dict(self.left_out), "buckets": dict(self.buckets)}
        others = {what: dict(its) for what, its in sorted(self.others.items())}
        partial = {} if self.partial is None else {"partial": sorted(map(list, self.partial))}
        return {"format": FORMAT, "states": states, **of_all, "others": others, **partial, "sizes": dict(self.sizes)}


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
        states = {
            (str(parameter), str(name)): State(int(row[0]), int(row[1]), str(row[2]))
            for parameter, of_one in value["states"].items()
            for name, row in of_one.items()
        }
        settings, others = (
            {str(what): {str(name): its[name] for name in its} for what, its in value.get(part, {}).items()}
            for part in ("settings", "others")
        )
        left_out = {str(what): str(why) for what, why in value["left_out"].items()}
        partial = frozenset((str(p), str(s)) for p, s in value["partial"]) if "partial" in value else None
        sizes = {str(parameter): int(numel) for parameter, numel in value.get("sizes", {}).items()}
        return Record(states, settings, left_out, dict(value["buckets"]), others, partial, sizes, "sizes" in value)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise NotARecord(f"expected a record of fingerprints, found {type(value).__name__} ({error!r})") from None


def digest(value: Any, size: int = 16) -> str:
    """A digest, of `size` bytes, of a value's text."""
    return hashlib.blake2b(repr(value).encode(), digest_size=size).hexdigest()


def lacking(held: Mapping[tuple[str, str], int], states: Mapping[tuple[str, str], int]) -> set[tuple[str, str]]:
    """The states that a rank lacks of the parameters that it holds, given the elements of each full state.

    Only of those with as many elements as the parameter: other ones can be divided among ranks in another way.
    """
    own = {parameter: numel for (parameter, state), numel in held.items() if state in ("master", "weight")}
    return {key for key, numel in states.items() if own.get(key[0]) == numel and key not in held}


def merged(records: Iterable[Record]) -> Record:
    """The sum of the records of all ranks' parts."""
    states: dict[tuple[str, str], State] = {}
    settings: dict[str, Settings] = {}
    left_out: dict[str, str] = {}
    buckets: dict[str, Any] = {}
    others: dict[str, Settings] = {}
    sizes: dict[str, int] = {}
    for record in records:
        for key, part in record.states.items():
            states[key] = part.added_to(states.get(key))
        for parameter, its in record.settings.items():
            add_settings(settings, left_out, parameter, its)
        for what, its in record.others.items():
            if others.setdefault(what, its) != its:
                left_out[what] = NOT_ALIKE
        left_out.update(record.left_out)
        buckets.update(record.buckets)
        sizes.update(record.sizes)
    some = {parameter for (parameter, _), state in states.items() if state.numel != sizes.get(parameter)}
    sizes = {parameter: numel for parameter, numel in sizes.items() if parameter in some}
    others = {what: its for what, its in others.items() if what not in left_out}
    return Record(states, settings, left_out, buckets, others, sizes=sizes)


def settings_of(group: Mapping[str, Any], states: Mapping[str, Any]) -> Settings:
    """The settings of a parameter, from its group; its step may be among its states."""
    found = {name: group[name] for name in (*SETTINGS, RATE) if name in group}
    step = states.get("step", found.get("step"))
    if step is not None:
        found["step"] = step if type(step) is int else whole(float(step))
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def whole(step: float) -> float:
    """A step as an integer, unless it has a fraction or is not finite."""
    return int(step) if step.is_integer() else step


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
    saved: Mapping[str, Settings], found: Mapping[str, Settings], names: Iterable[str] = SETTINGS
) -> list[SettingDifference]:
    """The differences in the settings of common parameters; a lost one is a difference."""
    known = set(names)
    return [
        SettingDifference(parameter, name, its[name], found[parameter].get(name))
        for parameter, its in sorted(saved.items())
        if parameter in found
        for name in sorted(its.keys() & known)
        if not same(its[name], found[parameter].get(name))
    ]


def other_differences(saved: Mapping[str, Settings], found: Mapping[str, Settings]) -> list[SettingDifference]:
    """The differences in common non-parameter values."""
    return [
        SettingDifference(what, name, saved[what].get(name), found[what].get(name))
        for what in sorted(saved.keys() & found.keys())
        for name in sorted(saved[what].keys() | found[what].keys())
        if saved[what].get(name) != found[what].get(name)
    ]


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
