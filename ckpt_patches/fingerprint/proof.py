"""Collective operations: make the record of a save, and verify a load.

Message sizes hardly grow with the number of ranks. With FSDP every rank has a shard of every parameter: at a save only
one of the ranks with the same list of states sends the names to the first rank, and the sums of the shards are reduced.
A load sums two numbers per state over all ranks; ranks exchange more only where a state is odd.
"""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import distributed

from ckpt_patches import tell
from ckpt_patches.errors import FingerprintError
from ckpt_patches.fingerprint import record as records
from ckpt_patches.fingerprint.comparison import NOWHERE, SHARED, Difference, Verdict, judge
from ckpt_patches.fingerprint.element_hash import MODULUS
from ckpt_patches.fingerprint.live_state import Live, Sums, sums
from ckpt_patches.fingerprint.record import BUFFER, RATE, SETTINGS, Key, NotARecord, Record, SettingDifference, State
from ckpt_patches.fingerprint.states import OF_BUFFER
from ckpt_patches.runtime.ranks import is_rank_zero

SWITCH = "CKPT_PATCHES_FINGERPRINT"
DIFFER = "ranks that hold the same elements differ"
NO_DIVISION = "the ranks do not have each of its elements once, or as often as others"
logger = logging.getLogger("ckpt_patches")


# A save


class Held(NamedTuple):
    """What is known of a state."""

    whole: int  # elements of the full parameter
    dtype: str
    first: int | None  # the first rank that has all of them; None if none has


def recorded(live: Live, group: Any = None) -> dict[str, Any]:
    """The record to put into a checkpoint, equal on all ranks; all ranks of the group call it.

    Args:
        live: this rank's part of the state.
        group: the ranks whose parts are merged; None for all.
    """
    found, rank = sums(live.parts()), rank_in(group)
    names = sorted((key, one.whole, one.dtype, one.main_numel == one.whole) for key, one in found.items())
    rest = Record({}, live.settings, live.left_out, live.buckets, live.others)
    digests = from_all((records.digest(names), records.digest(rest.as_plain())), group)
    of_names, of_rest = zip(*digests, strict=True)
    own = (
        names if of_names.index(of_names[rank]) == rank else (),
        rest if of_rest.index(of_rest[rank]) == rank else None,
    )
    of_ranks = to_first(own, group)
    held: dict[Key, Held] = from_first(of_ranks and _held(names for names, _ in of_ranks), group)
    table = [_row(found.get(key), one.first, rank) for key, one in held.items()]
    totals = summed(table, 4, group)
    plain = None
    if of_ranks is not None:
        merged = records.merged(rest for _, rest in of_ranks if rest is not None)
        plain = _with_states(merged, held, totals).as_plain()
    whole: dict[str, Any] = from_first(plain, group)
    return whole


def _held(of_ranks: Iterable[Sequence[tuple[Key, int, str, bool]]]) -> dict[Key, Held]:
    found: dict[Key, Held] = {}
    for rank, names in enumerate(of_ranks):
        for key, whole, dtype, is_all in names:
            known = found.setdefault(key, Held(whole, dtype, None))
            if is_all and known.first is None:
                found[key] = known._replace(first=rank)
    return found


def _row(own: Sums | None, first: int | None, rank: int) -> tuple[int, int, int, int]:
    """This rank's elements of a state, and their sum: those that count, and all."""
    if own is None:
        return 0, 0, 0, 0
    is_copy = own.main_numel == own.whole and first != rank
    return *((0, 0) if is_copy else (own.main_numel, own.main_value)), own.numel, own.value


def _with_states(rest: Record, held: Mapping[Key, Held], totals: Sequence[Sequence[int]]) -> Record:
    """The record of all ranks' states; one whose replicas differ is left out."""
    states, copies, left_out = {}, {}, dict(rest.left_out)
    for (key, one), (numel, value, of_all, value_of_all) in zip(held.items(), totals, strict=True):
        copies[key], others = divmod(of_all, max(numel, 1))
        if numel > one.whole or others or (of_all and not numel):
            left_out[" ".join(key)] = NO_DIVISION
        elif value_of_all != copies[key] * value % MODULUS:
            left_out[" ".join(key)] = DIFFER
        else:
            states[key] = State(numel, value, one.whole, one.dtype)
    own = {key[0]: key for key in states if key[1] in ("master", "weight")}
    partial = frozenset(key for key in states if key[0] in own and copies[key] < copies[own[key[0]]])
    return replace(rest, states=states, left_out=left_out, partial=partial)


# A load


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
    conclude(verdict)
    return verdict


def conclude(verdict: Verdict) -> None:
    """Log a verdict on the first rank.

    Raises:
        FingerprintError: something differs, or could not be compared, unless the switch is set to `warn`.
    """
    if not verdict.is_equal and os.environ.get(SWITCH) != "warn":
        raise FingerprintError("\n".join([*verdict.lines(), f"  To continue anyway: {SWITCH}=warn"]))
    if is_rank_zero(os.environ):
        is_odd = not verdict.is_equal or verdict.not_verified or verdict.rates
        _log(logging.WARNING if is_odd else logging.INFO, "\n".join(verdict.lines()))


def verdict_of(live: Live, plain: Any, group: Any = None) -> Verdict:
    """Compare as `prove`, without logging or raising an error."""
    record, problem = _read(plain)
    said = from_all((records.digest(record.as_plain() if record else None), plain is not None), group)
    if len(set(said)) > 1:
        problem, record = "its fingerprint is not the same on all ranks", None
    if record is None:
        return Verdict(not_verified={"the checkpoint": problem}, missed=any(has_one for _, has_one in said))
    found = sums(live.parts())
    odd = from_all(_odd(live, record, found), group)
    left_out = {what: why for of_rank in odd for what, why in of_rank.left_out.items()}
    nowhere = set[str].intersection(*(of_rank.lacks for of_rank in odd))  # each pipeline stage has its own buffers
    verdict = judge(record, _totals(record, found, odd, group), {**dict.fromkeys(sorted(nowhere), NOWHERE), **left_out})
    settings = each_once(one for of_rank in odd for one in of_rank.settings)
    shared = {key: other for of_rank in odd for key, other in of_rank.shared.items()}
    alike = [
        Difference(key[0], key[1], SHARED, f"in the memory of {other[0]} {other[1]}: a step changes it twice")
        for key, other in shared.items()
    ]
    return replace(
        verdict,
        differences=[*verdict.differences, *alike],
        missed=verdict.missed and not (settings or alike),
        settings=[one for one in settings if one.setting != RATE],
        rates=[one for one in settings if one.setting == RATE],
        besides=_besides(record, nowhere, verdict),
    )


class Odd(NamedTuple):
    """How one rank's state deviates from the record; usually empty."""

    states: dict[Key, State]  # those that the record does not have, or with another dtype or size of the parameter
    settings: list[SettingDifference]
    left_out: dict[str, str]
    shared: dict[Key, Key]
    lacks: set[str]  # names of non-parameter values that this rank lacks


def _odd(live: Live, record: Record, found: Mapping[Key, Sums]) -> Odd:
    own = {key: State(one.numel, one.value, one.whole, one.dtype) for key, one in found.items()}
    states = {key: one for key, one in own.items() if key not in record.states or one[2:] != record.states[key][2:]}
    numbers = {name for its in record.settings.values() for name in its if name.startswith(records.STATE)}
    settings = records.setting_differences(record.settings, live.settings, (*SETTINGS, RATE, *numbers))
    settings += records.setting_differences(record.others, live.others)
    lacks = record.others.keys() - live.others.keys()
    return Odd(states, settings, dict(live.left_out), dict(live.shared), lacks)


def each_once(differences: Iterable[SettingDifference]) -> list[SettingDifference]:
    """The differences, sorted, without duplicates from several ranks."""
    found = {tuple(map(str, one)): one for one in differences}
    return [found[key] for key in sorted(found)]


def _besides(record: Record, nowhere: set[str], verdict: Verdict) -> list[str]:
    """What was verified besides states of parameters."""
    others = sorted(record.others.keys() - nowhere)
    buffers = sum(what.startswith(BUFFER) for what in others) + sum(key[1] == OF_BUFFER for key in verdict.verified)
    found = [f"{buffers} buffer{'' if buffers == 1 else 's'}"] if buffers else []
    found += ["settings"] if record.settings and verdict.verified else []
    return found + [what for what in others if not what.startswith(BUFFER)]


def _read(plain: Any) -> tuple[Record | None, str]:
    if plain is None:
        return None, f"it has no fingerprint: it was saved without {SWITCH}"
    try:
        return records.from_plain(plain), ""
    except NotARecord as error:
        return None, str(error)


def _totals(record: Record, found: Mapping[Key, Sums], odd: Sequence[Odd], group: Any) -> dict[Key, State]:
    """The totals over all ranks, for the record's states that any rank holds and for the additional live states."""
    table = [(found[key].numel, found[key].value) if key in found else (0, 0) for key in record.states]
    others = {key: own for of_rank in odd for key, own in of_rank.states.items()}
    totals = {key: own for key, own in others.items() if key not in record.states}
    for (key, state), (numel, value) in zip(record.states.items(), summed(table, 2, group), strict=True):
        if numel:
            totals[key] = State(numel, value, *others.get(key, state)[2:])
    return totals


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


def summed(rows: Sequence[Sequence[int]], columns: int, group: Any) -> list[list[int]]:
    """The sums of a table over all ranks, modulo 2^64."""
    table = np.array(rows, np.uint64).reshape(-1, columns)
    if not alone(group):
        device = "cuda" if "nccl" in str(distributed.get_backend(group)) else "cpu"
        held = torch.from_numpy(table.view(np.int64)).to(device)
        distributed.all_reduce(held, group=group)
        table = held.cpu().numpy().view(np.uint64)
    found: list[list[int]] = table.tolist()
    return found


def _global_rank_of_first(group: Any) -> int:
    return 0 if group is None else distributed.get_global_rank(group, 0)


def _log(level: int, message: str) -> None:
    """Log a message, or print it to stderr if logging is not configured."""
    if logger.hasHandlers() and not logger.disabled:
        logger.log(level, message)
    else:
        tell(f"{logging.getLevelName(level)}: {message}", f"[{logger.name}]")
