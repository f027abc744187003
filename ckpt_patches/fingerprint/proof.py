"""Collective operations: make the record of a save, and verify a load.

Message sizes do not grow with the number of ranks, except for the names at a save: each rank sends the names of its
states to the first one, which broadcasts the merged record. A load sums two numbers per state over all ranks; ranks
exchange more only if a state is wrong.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import distributed

from ckpt_patches import tell
from ckpt_patches.errors import FingerprintError
from ckpt_patches.fingerprint import record as records
from ckpt_patches.fingerprint.live_state import Live, sums
from ckpt_patches.fingerprint.record import RATE, SETTINGS, NotARecord, Record, SettingDifference
from ckpt_patches.fingerprint.verdict import (
    NOWHERE,
    Besides,
    Hint,
    Key,
    Total,
    Verdict,
    besides_sentences,
    judge,
    sentences,
    unequal,
)
from ckpt_patches.runtime.ranks import is_rank_zero

Numbers = np.ndarray[Any, np.dtype[np.uint64]]
SWITCH = "CKPT_PATCHES_FINGERPRINT"
logger = logging.getLogger("ckpt_patches")


def recorded(live: Live, group: Any = None) -> dict[str, Any]:
    """The record to put into a checkpoint, equal on all ranks; all ranks of the group call it.

    Args:
        live: this rank's part of the state.
        group: the ranks whose parts are merged; None for all.
    """
    found = sums(live.parts(), main=True)
    own = {key: one.as_state() for key, one in found.items()}
    sizes = {key[0]: one.whole for key, one in found.items()}
    parts = to_first(Record(own, live.settings, live.left_out, live.buckets, live.others, sizes=sizes), group)
    whole: dict[str, Any] = from_first(records.merged(parts).as_plain() if parts is not None else None, group)
    return whole


def prove(live: Live, plain: Any, group: Any = None) -> Verdict:
    """Compare the live state with a checkpoint's record, and log the result; all ranks of the group call it.

    Args:
        live: this rank's part of the state, after the load.
        plain: the record in the checkpoint, or None.
        group: the ranks whose parts are merged; None for all.

    Raises:
        FingerprintError: on all ranks, if the state differs from the saved one, or nothing could be compared with an
            existing record, unless the switch is set to `warn`.
    """
    verdict = verdict_of(live, plain, group)
    lines = sentences(verdict)
    odd = verdict.is_wrong or verdict.not_verified or verdict.rates
    _conclude(lines, is_error=verdict.is_wrong or verdict.nothing_is_verified, is_odd=bool(odd))
    return verdict


def prove_besides(ranks: Sequence[Besides]) -> None:
    """Log the comparisons of a run's state besides its optimizer, given those of all ranks.

    Raises:
        FingerprintError: a value differs from the saved one, unless the switch is set to `warn`.
    """
    differences = _each_once(one for of_rank in ranks for one in of_rank.differences)
    not_verified = {what: why for of_rank in ranks for what, why in of_rank.not_verified.items()}
    equal = set[str].intersection(*(set(of_rank.equal) for of_rank in ranks))
    lines = besides_sentences(sorted(equal), differences, not_verified)
    _conclude(lines, is_error=bool(differences), is_odd=bool(differences or not_verified))


def _conclude(lines: Sequence[str], *, is_error: bool, is_odd: bool) -> None:
    """Raise an error unless the switch is set to `warn`; else log the lines, if any, on the first rank."""
    if is_error and os.environ.get(SWITCH) != "warn":
        raise FingerprintError("\n".join([*lines, f"  To continue anyway: {SWITCH}=warn"]))
    if lines and is_rank_zero(os.environ):
        _log(logging.WARNING if is_odd else logging.INFO, "\n".join(lines))


def log_not_verified(why: str) -> None:
    """Log on the first rank that there is nothing to compare the state with."""
    if is_rank_zero(os.environ):
        _log(logging.WARNING, "\n".join(sentences(Verdict(not_verified={"the optimizer's state": why}))))


def verdict_of(live: Live, plain: Any, group: Any = None) -> Verdict:
    """Compare as `prove`, without logging or raising an error."""
    record, problem = _read(plain)
    said = from_all((records.digest(record.as_plain() if record else None), plain is not None), group)
    if len(set(said)) > 1:
        return Verdict(not_verified={"the checkpoint": "its fingerprint is not the same on all ranks"}, recorded=True)
    if record is None:
        return Verdict(not_verified={"the checkpoint": problem}, recorded=said[0][1])
    found = sums(live.parts(), main=False)
    odd = from_all(_odd(live, record, found), group)
    totals = _totals(record, found, odd, group)
    wrong = unequal(record, totals)
    hints = from_all(_hints(live, wrong), group) if wrong else []
    by_key = {key: [of_rank[key] for of_rank in hints if key in of_rank] for key in wrong}
    settings = _each_once(one for of_rank in odd for one in of_rank.settings)
    left_out = {what: why for of_rank in odd for what, why in of_rank.left_out.items()}
    shared = {key: other for of_rank in odd for key, other in of_rank.shared.items()}
    nowhere = set[str].intersection(*(of_rank.lacks for of_rank in odd))  # each pipeline stage has its own buffers
    left_out = {**dict.fromkeys(sorted(nowhere), NOWHERE), **left_out}
    others = sorted(record.others.keys() - nowhere)
    lacking = Counter(key for of_rank in odd for key in of_rank.lacking)
    return judge(
        record,
        totals,
        hints=by_key,
        settings=settings,
        left_out=left_out,
        shared=shared,
        others=others,
        lacking=lacking,
    )


class Odd(NamedTuple):
    """How one rank's state deviates from the record; usually empty."""

    kinds: dict[Key, tuple[int, str]]  # elements of the full parameter and dtype, if they differ
    besides: dict[Key, Total]  # states that the record does not have
    settings: list[SettingDifference]
    left_out: dict[str, str]
    shared: dict[Key, Key]
    lacks: set[str]  # names of non-parameter values that this rank lacks
    lacking: set[Key]  # states of parameters that it holds, and that all ranks with the parameter had


def _odd(live: Live, record: Record, found: Mapping[Key, Total]) -> Odd:
    known = {key: (one.whole, one.dtype) for key, one in found.items() if key in record.states}
    kinds = {key: kind for key, kind in known.items() if kind != (record.states[key].numel, record.states[key].dtype)}
    besides = {key: one for key, one in found.items() if key not in record.states}
    numbers = {name for its in record.settings.values() for name in its if name.startswith(records.STATE)}
    settings = records.setting_differences(record.settings, live.settings, (*SETTINGS, RATE, *sorted(numbers)))
    settings += records.other_differences(record.others, live.others)
    lacks = record.others.keys() - live.others.keys()
    lacking: set[Key] = set()
    if record.partial is not None:
        held = {key: one.whole for key, one in found.items()}
        lacking = records.lacking(held, {key: state.numel for key, state in record.states.items()}) - record.partial
    return Odd(kinds, besides, settings, dict(live.left_out), dict(live.shared), lacks, lacking)


def _each_once(differences: Iterable[SettingDifference]) -> list[SettingDifference]:
    """The differences, sorted, without duplicates from several ranks."""
    return sorted({_hashable(one): one for one in differences}.values(), key=_hashable)


def _hashable(one: SettingDifference) -> tuple[str, ...]:
    return tuple(map(str, one))


def _read(plain: Any) -> tuple[Record | None, str]:
    if plain is None:
        return None, f"it has no fingerprint: it was saved without {SWITCH}"
    try:
        return records.from_plain(plain), ""
    except NotARecord as error:
        return None, str(error)


def _totals(record: Record, found: Mapping[Key, Total], odd: Sequence[Odd], group: Any) -> dict[Key, Total]:
    """The totals over all ranks, for the record's states that any rank holds and for the additional live states."""
    known = list(record.states)
    table = np.array([(found[key].numel, found[key].value) if key in found else (0, 0) for key in known], np.uint64)
    kinds = {key: kind for of_rank in odd for key, kind in of_rank.kinds.items()}
    totals: dict[Key, Total] = {}
    for key, (numel, value) in zip(known, summed(table.reshape(-1, 2), group).tolist(), strict=True):
        if numel:
            totals[key] = Total(numel, value, *kinds.get(key, (record.states[key].numel, record.states[key].dtype)))
    for of_rank in odd:
        for key, one in of_rank.besides.items():
            totals.setdefault(key, Total(whole=one.whole, dtype=one.dtype)).add(one.numel, one.value)
    return totals


def _hints(live: Live, wrong: Sequence[Key]) -> dict[Key, Hint]:
    """This rank's observations on its elements of the wrong states."""
    found: dict[Key, Hint] = {}
    for part in live.parts():
        key = part.parameter, part.state
        if key in wrong and len(part.values):
            before = found.get(key, Hint(0, 0, True))
            none = int((part.values == 0).sum())
            is_narrow = before.narrow and _is_narrow(part.values)
            found[key] = Hint(before.numel + len(part.values), before.zeros + none, is_narrow)
    return found


def _is_narrow(values: torch.Tensor) -> bool:
    """Whether all elements are 16-bit floats."""
    return any(torch.equal(values.to(dtype).to(values.dtype), values) for dtype in (torch.bfloat16, torch.float16))


# Collectives; a single process calls none


def alone(group: Any) -> bool:
    return not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size(group) == 1


def rank_in(group: Any) -> int:
    """This process's rank in a group; None: in the default one."""
    return 0 if alone(group) else distributed.get_rank(group)


def to_first(value: Any, group: Any) -> list[Any] | None:
    """The values of all ranks, on the first one."""
    if alone(group):
        return [value]
    first = distributed.get_rank(group) == 0
    found: list[Any] | None = [None] * distributed.get_world_size(group) if first else None
    distributed.gather_object(value, found, dst=_global_rank_of_first(group), group=group)
    return found


def from_first(value: Any, group: Any) -> Any:
    """The value of a group's first rank, on all ranks."""
    if alone(group):
        return value
    held = [value]
    distributed.broadcast_object_list(held, src=_global_rank_of_first(group), group=group)
    return held[0]


def from_all(value: Any, group: Any) -> list[Any]:
    if alone(group):
        return [value]
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, value, group=group)
    return found


def summed(table: Numbers, group: Any) -> Numbers:
    """The sum over all ranks, modulo 2^64."""
    if alone(group):
        return table
    device = "cuda" if "nccl" in str(distributed.get_backend(group)) else "cpu"
    held = torch.from_numpy(table.view(np.int64)).to(device)
    distributed.all_reduce(held, group=group)
    found: Numbers = held.cpu().numpy().view(np.uint64)
    return found


def _global_rank_of_first(group: Any) -> int:
    return 0 if group is None else distributed.get_global_rank(group, 0)


def _log(level: int, message: str) -> None:
    """Log a message, or print it to stderr if logging is not configured."""
    if logger.hasHandlers() and not logger.disabled:
        logger.log(level, message)
    else:
        tell(f"{logging.getLevelName(level)}: {message}", f"[{logger.name}]")
