"""Compare the fingerprints of a checkpoint's files with the record of the run that saved it, or with other files."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_patches.fingerprint.record import NotARecord, Record, State, from_plain
from ckpt_patches.fingerprint.states import FROZEN, OF_BUFFER, Fingerprint
from ckpt_patches.fingerprint.verdict import Difference, Key, Total, Verdict, judge
from ckpt_patches.formats.megatron_names import is_bucket

CHAINED = re.compile(r"^chained_\d+\.")  # prefix of tensor names if there are several optimizers
# An expert by its number on its rank; with a single expert-parallel rank, this is the global number.
LOCAL_EXPERT = re.compile(r"\bdeepspeed_experts\.(\d+)\.")
STEP = "step"  # a state that a record has among a parameter's settings
OF_MODEL = ("master", "weight", FROZEN, OF_BUFFER)  # states that are parameters themselves
NO_TENSOR = "it is in no tensor of its own in the files"
NOT_RECORDED = "the run recorded nothing of it"


class Checked(NamedTuple):
    """The result of a comparison."""

    verified: int  # number of states
    differences: list[Difference]
    not_verified: dict[str, str]  # by name, the reason
    missed: bool = False  # whether no state of an optimizer could be compared, though there is a record
    settings: int = 0  # number of verified settings

    @property
    def is_equal(self) -> bool:
        """Whether there is no difference, and something was compared."""
        return not (self.differences or self.missed)

    def sentence(self) -> str:
        """The result in one line."""
        rest = f"; {len(self.not_verified)} not verified" if self.not_verified else ""
        states = f"{self.verified} states" + (f" and {self.settings} settings" if self.settings else "")
        if self.differences:
            kinds = Counter(one.kind for one in self.differences)
            counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
            return f"differs: {counted}; {states} verified{rest}"
        if not self.verified:
            return f"not verified: no state could be compared{rest}"
        return f"not verified; {states} verified{rest}" if self.missed else f"verified: {states}{rest}"


def together(checked: Sequence[Checked]) -> Checked:
    """Merge the results of several comparisons."""
    differences = [one for own in checked for one in own.differences]
    not_verified = {what: why for own in checked for what, why in own.not_verified.items()}
    is_missed, settings = any(own.missed for own in checked), sum(own.settings for own in checked)
    return Checked(sum(own.verified for own in checked), differences, not_verified, is_missed, settings)


def of_two(
    one: Iterable[Fingerprint],
    other: Iterable[Fingerprint],
    unread: Mapping[str, str],
    unread_of_other: Mapping[str, str],
) -> Checked:
    """Compare two checkpoints.

    Args:
        one, other: the fingerprints of their states.
        unread, unread_of_other: what has no fingerprint in each, and the reasons.
    """
    first = {(its.parameter, its.state): State(its.numel, its.value) for its in one}
    second = {(its.parameter, its.state): its for its in other}
    keys = first.keys() | second.keys()
    read = {" ".join(key) for key in keys} | {parameter for parameter, state in keys if state == "model"}
    alone = [
        Difference(name, "", "missing", f"in the {'first' if name in unread else 'second'} one alone")
        for name in sorted(unread.keys() ^ unread_of_other.keys())
        if not is_bucket(name) and name not in read
    ]
    record = Record(first, left_out=unread)
    verdict = judge(
        record,
        _totals(record, second),
        hints={},
        left_out=unread_of_other,
        here="the second one",
        saved="the first one",
        general=is_bucket,
    )
    is_missed = not verdict.verified or any(map(is_bucket, verdict.not_verified))
    return Checked(len(verdict.verified), [*verdict.differences, *alone], dict(verdict.not_verified), is_missed)


def with_buckets(found: Checked, one: Mapping[str, Any], other: Mapping[str, Any]) -> Checked:
    """The result with arrays of buckets by name: equal ones are verified; others may have other padding or places."""
    same = {name for name in one.keys() & other.keys() if one[name] == other[name]}
    left = {what: why for what, why in found.not_verified.items() if what not in same}
    verified = found.verified + len(same)
    return found._replace(verified=verified, not_verified=left, missed=not verified or any(map(is_bucket, left)))


def with_record(plain: Any, found: Iterable[Fingerprint], unread: Mapping[str, str] | None = None) -> Checked:
    """Compare the states in the files with the record.

    Args:
        plain: the record in the checkpoint.
        found: the fingerprints of its files; the state "model" is not an optimizer's.
        unread: what has no fingerprint, and the reasons.
    """
    try:
        record = from_plain(plain)
    except NotARecord as error:
        return Checked(0, [], {"the record": str(error)}, missed=True)
    states = {(_recorded_name(one.parameter), one.state): one for one in found if one.state != STEP}
    named = _as_recorded(record, states)
    known = {" ".join(key) for key in record.states}
    of_record = {what: why for what, why in (unread or {}).items() if what in known or is_bucket(what)}
    left_out = {**of_record, **_unnamed(record, states, named)}
    totals = _totals(record, named)
    verdict = judge(record, totals, hints={}, left_out=left_out, here="the checkpoint", general=is_bucket)
    return Checked(
        len(verdict.verified), list(verdict.differences), dict(verdict.not_verified), _is_missed(record, verdict)
    )


def _recorded_name(parameter: str) -> str:
    """A parameter's name in a record."""
    return LOCAL_EXPERT.sub(r"deepspeed_experts.global_\1.", CHAINED.sub("", parameter))


def _totals(record: Record, found: Mapping[Key, Fingerprint]) -> dict[Key, Total]:
    """The elements in the files; their parameters are of the size that was recorded."""
    wholes = {key: record.sizes.get(key[0], state.numel) for key, state in record.states.items()}
    return {key: Total(one.numel, one.value, wholes.get(key, one.numel)) for key, one in found.items()}


def _as_recorded(record: Record, found: Mapping[Key, Fingerprint]) -> dict[Key, Fingerprint]:
    """The states in the files whose parameters the record has.

    A weight of an fp32 model is the main parameter as well, and a frozen one its only state; each is saved once.
    """
    parameters = {parameter for parameter, _ in record.states}
    named = {key: one for key, one in found.items() if key[0] in parameters and key[1] != "model"}
    for key, state in record.states.items():
        weight = found.get((key[0], "model"))
        if key[1] == FROZEN and (key[0], "master") not in record.states:  # a conversion writes it as a main parameter
            weight = named.pop((key[0], "master"), weight)
        if key in named or weight is None:
            continue
        if key[1] in (FROZEN, OF_BUFFER) or (key[1] == "master" and weight.value == state.value):
            named[key] = weight
    return named


def _unnamed(record: Record, found: Mapping[Key, Fingerprint], named: Mapping[Key, Fingerprint]) -> dict[str, str]:
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


def _is_missed(record: Record, verdict: Verdict) -> bool:
    """Whether no state of an optimizer could be compared, though the record has some."""
    has_optimizer = any(state not in OF_MODEL for _, state in record.states)
    is_compared = any(state not in OF_MODEL or not has_optimizer for _, state in verdict.verified)
    return bool(record.states) and not (is_compared or verdict.differences)
