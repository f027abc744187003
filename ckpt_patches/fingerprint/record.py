"""What a checkpoint says of its own state: plain numbers and strings, where all formats keep what is not sharded."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

KEY = "ckpt_patches_fingerprint"  # of the common state
FORMAT = 1
STEP = "global_steps"  # of the run, where a client gets the record and may save it again
SAMPLE = 8  # elements in the middle of a state, kept to find it where it has moved to
# Of a parameter: what must be the same, and the rate, which is for information: a schedule changes it.
SETTINGS = ("weight_decay", "betas", "eps", "step")
RATE = "lr"

Settings = Mapping[str, Any]


class State(NamedTuple):
    """One state of one parameter."""

    numel: int
    value: int  # of 64 bits, see mix
    dtype: str = "float32"  # that it was kept in
    sample: Mapping[int, int] = {}  # bits of some elements, by their places


@dataclass(frozen=True)
class Record:
    """Of a whole job's state."""

    states: Mapping[tuple[str, str], State]
    settings: Mapping[str, Settings] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    buckets: Mapping[str, Any] = field(default_factory=dict)  # where parameters begin in Megatron's, as `Layout` says
    others: Mapping[str, Settings] = field(default_factory=dict)  # of what is no parameter

    def as_plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        states: dict[str, dict[str, list[Any]]] = {}
        for (parameter, name), state in sorted(self.states.items()):
            row = [state.numel, state.value, state.dtype, dict(state.sample)]
            states.setdefault(parameter, {})[name] = row
        settings = {parameter: dict(its) for parameter, its in sorted(self.settings.items())}
        of_all = {"settings": settings, "left_out": dict(self.left_out), "buckets": dict(self.buckets)}
        others = {what: dict(its) for what, its in sorted(self.others.items())}
        return {"format": FORMAT, "states": states, **of_all, "others": others}


def of_step(plain: Any, step: Any) -> Any:
    """A record in a checkpoint of that step.

    Where it says another one, a run that knows nothing of it has saved it again: it tells nothing of this checkpoint.
    """
    if not isinstance(plain, dict) or plain.get(STEP, step) == step:
        return plain
    why = f"the record is of step {plain[STEP]}, and the checkpoint of step {step}: its run recorded nothing"
    return Record({}, left_out={"the checkpoint": why}).as_plain()


class NotARecord(Exception):
    """What stands in a checkpoint is of another format, or damaged."""


def from_plain(value: Any) -> Record:
    """What `as_plain` has made.

    Raises:
        NotARecord: it is not.
    """
    try:
        if value["format"] != FORMAT:
            raise NotARecord(f"expected format {FORMAT}, found {value['format']}: it is of another release of ours")
        states = {
            (str(parameter), str(name)): State(int(numel), int(number), str(dtype), dict(sample))
            for parameter, of_one in value["states"].items()
            for name, (numel, number, dtype, sample) in of_one.items()
        }
        others = dict(value.get("others", {}))
        return Record(states, dict(value["settings"]), dict(value["left_out"]), dict(value["buckets"]), others)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotARecord(f"expected a record of fingerprints, found {type(value).__name__} ({error!r})") from None


def from_text(text: Any) -> Any:
    """A record that is kept as one string; what is none is given back, and is no record."""
    if not isinstance(text, str):
        return text
    try:
        plain = json.loads(text)
        for of_one in plain["states"].values():
            for row in of_one.values():
                row[3] = {int(place): bits for place, bits in row[3].items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return text
    return plain


def sample_place(numel: int) -> int:
    """Where the sample of a state begins."""
    return max(numel // 2 - SAMPLE // 2, 0)


def merged(records: Iterable[Record]) -> Record:
    """Of the parts of all ranks."""
    states: dict[tuple[str, str], State] = {}
    settings: dict[str, Settings] = {}
    left_out: dict[str, str] = {}
    buckets: dict[str, Any] = {}
    others: dict[str, Settings] = {}
    for record in records:
        for key, part in record.states.items():
            one = states.get(key, State(0, 0, part.dtype))
            value = (one.value + part.value) % (1 << 64)
            states[key] = State(one.numel + part.numel, value, part.dtype, {**one.sample, **part.sample})
        for parameter, its in record.settings.items():
            add_settings(settings, left_out, parameter, its)
        for what, its in record.others.items():
            if others.setdefault(what, its) != its:
                left_out[what] = "not the same on all ranks that saved"
        left_out.update(record.left_out)
        buckets.update(record.buckets)
    others = {what: its for what, its in others.items() if what not in left_out}
    return Record(states, settings, left_out, buckets, others)


def settings_of(group: Mapping[str, Any], states: Mapping[str, Any]) -> Settings:
    """Of a parameter: those of its group; its step may be among its states."""
    found = {name: group[name] for name in (*SETTINGS, RATE) if name in group}
    step = states.get("step", found.get("step"))
    if step is not None:
        found["step"] = int(step)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def add_settings(known: dict[str, Settings], left_out: dict[str, str], parameter: str, its: Settings) -> None:
    """What one part of a parameter has; of layers that are one parameter in checkpoints some may have others."""
    before = known.setdefault(parameter, its)
    differ = {name for name in before.keys() & its.keys() if before[name] != its[name]}
    if differ:
        known[parameter] = {name: value for name, value in before.items() if name not in differ}
        left_out.update({f"{parameter} {name}": "its parts differ in it" for name in differ - {RATE}})


class SettingDifference(NamedTuple):
    """A setting of a parameter that is not what it was."""

    parameter: str
    setting: str
    saved: Any
    found: Any


def setting_differences(
    saved: Mapping[str, Settings], found: Mapping[str, Settings], names: Sequence[str] = SETTINGS
) -> list[SettingDifference]:
    """Of the parameters that both have, in the settings that both have; without a step a run would begin anew."""
    return [
        SettingDifference(parameter, name, its[name], found[parameter].get(name))
        for parameter, its in sorted(saved.items())
        for name in names
        if parameter in found and name in its and (name in found[parameter] or name == "step")
        if _plain(its[name]) != _plain(found[parameter].get(name))
    ]


def other_differences(saved: Mapping[str, Settings], found: Mapping[str, Settings]) -> list[SettingDifference]:
    """Of what is no parameter, where both have it."""
    return [
        SettingDifference(what, name, saved[what].get(name), found[what].get(name))
        for what in sorted(saved.keys() & found.keys())
        for name in sorted(saved[what].keys() | found[what].keys())
        if saved[what].get(name) != found[what].get(name)
    ]


def plain_values(state: Mapping[Any, Any]) -> Settings:
    """What of a scheduler's state is numbers, words or lists of these; the rest is code."""
    return {str(name): value for name, value in state.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _plain(value: Any) -> Any:
    """Formats make lists of pairs, and floats of whole numbers."""
    if isinstance(value, list | tuple):
        return tuple(map(float, value))
    return None if value is None else float(value)
