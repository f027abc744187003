"""The record of a training run with plain torch: every element once, with messages that hardly grow with the ranks.

With FSDP every rank has a shard of every parameter. So only one of the ranks with the same list of states sends the
names, and the sums of the shards are reduced. Shards are sent one by one only for states that the sums cannot resolve.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ckpt_patches.fingerprint import record
from ckpt_patches.fingerprint.element_hash import MODULUS
from ckpt_patches.fingerprint.live_state import Live, Part, sums
from ckpt_patches.fingerprint.proof import from_all, from_first, rank_in, summed, to_first
from ckpt_patches.fingerprint.record import Record, State
from ckpt_patches.fingerprint.verdict import Key

DIFFER = "ranks that hold the same elements differ"
Place = tuple[str, str, str]  # parameter, state, and the place of the elements


class Held(NamedTuple):
    """A state with elements on a rank."""

    parameter: str
    state: str
    whole: int  # elements of the full parameter
    dtype: str
    is_all: bool  # whether the rank has all of them

    @property
    def key(self) -> Key:
        return self.parameter, self.state


class OfRank(NamedTuple):
    """The message from a rank to the first rank."""

    parts: dict[Place, State]  # of states whose replicas the sums cannot resolve
    rest: Record | None  # settings and others; None if they equal the first rank's
    lacking: set[Key]  # states of the parameters that it holds


def recorded(own: Live, group: Any = None) -> str:
    """The record of all ranks' parts as JSON, equal on all ranks of the group; all of them call it."""
    parts: dict[Place, State] = {}
    mains: dict[Place, bool] = {}
    sizes: dict[Key, int] = {}
    for part in own.parts():  # a part may be a copy, so hold one at a time
        place = _place(part)
        parts[place], mains[place], sizes[place[:2]] = _state(part), part.main, math.prod(part.box.shape)
    held = _held(parts, sizes)
    rank = rank_in(group)
    lists, first_of_all = _lists(held, rank, group)
    every = list(dict.fromkeys(one for listed in lists for one in listed))
    keys = list(dict.fromkeys(one.key for one in every))
    kinds = {one.key: one for one in every}
    whole = {one.key for one in held if one.is_all}
    main = {p: (first_of_all[p[:2]] == rank if p[:2] in whole else mains[p]) for p in parts}
    totals = dict(zip(keys, summed(_table(keys, parts, main), group).tolist(), strict=True))
    unclear = {key for key in keys if totals[key][0] != kinds[key].whole}
    rest = Record({}, own.settings, own.left_out, others=own.others)
    digests = from_all(record.digest(rest.as_plain()), group)
    sent = OfRank(
        {p: state for p, state in parts.items() if p[:2] in unclear},
        None if rank and digests[rank] == digests[0] else rest,
        record.lacking({one.key: one.whole for one in held}, {key: one.whole for key, one in kinds.items()}),
    )
    of_ranks = to_first(sent, group)
    clear = {key: total for key, total in totals.items() if key not in unclear}
    text = None if of_ranks is None else json.dumps(_together(of_ranks, clear, kinds).as_plain())
    found: str = from_first(text, group)
    return found


def _place(part: Part) -> Place:
    return part.parameter, part.state, str((part.box[:2], part.first, len(part.values)))


def _state(part: Part) -> State:
    (one,) = sums([part._replace(main=True)], main=True).values()
    return one.as_state()


def _held(parts: Mapping[Place, State], sizes: Mapping[Key, int]) -> list[Held]:
    """The states with elements on this rank, sorted."""
    numels: dict[Key, int] = defaultdict(int)
    for place, state in parts.items():
        numels[place[:2]] += state.numel
    dtypes = {place[:2]: state.dtype for place, state in parts.items()}
    return sorted(Held(*key, sizes[key], dtypes[key], numel == sizes[key]) for key, numel in numels.items())


def _lists(held: list[Held], rank: int, group: Any) -> tuple[list[list[Held]], dict[Key, int]]:
    """The distinct lists of the ranks, each sent once, and by state the first rank that has all its elements."""
    digests = from_all(record.digest(held), group)
    known = to_first(held if digests.index(digests[rank]) == rank else None, group)
    lists: list[list[Held] | None] = from_first(known, group)
    first: dict[Key, int] = {}
    for number, listed in enumerate(lists):
        for one in listed or ():
            if one.is_all:
                first.setdefault(one.key, number)
    return [listed for listed in lists if listed is not None], first


def _table(keys: Sequence[Key], parts: Mapping[Place, State], main: Mapping[Place, bool]) -> Any:
    """One row per state: number and sum of this rank's elements, first of those that count, then of all."""
    rows: dict[Key, list[int]] = {key: [0, 0, 0, 0] for key in keys}
    for place, state in parts.items():
        row = rows[place[:2]]
        counted = (state.numel, state.value) if main[place] else (0, 0)
        row[:] = [(a + b) % MODULUS for a, b in zip(row, (*counted, state.numel, state.value), strict=True)]
    return np.array(list(rows.values()), np.uint64).reshape(-1, 4)


def _together(of_ranks: Sequence[OfRank], totals: Mapping[Key, Sequence[int]], kinds: Mapping[Key, Held]) -> Record:
    """The record merged from all ranks' parts."""
    rest = record.merged([one.rest for one in of_ranks if one.rest is not None])
    states, differ = _part_by_part([one.parts for one in of_ranks])
    for key, (numel, value, of_all, value_of_all) in totals.items():
        if value_of_all == of_all // max(numel, 1) * value % MODULUS:
            states[key] = State(numel, value, kinds[key].dtype)
        else:
            differ.add(key)
    left_out = {**rest.left_out, **{" ".join(key): DIFFER for key in sorted(differ)}}
    partial = frozenset().union(*(one.lacking for one in of_ranks))
    return Record(states, rest.settings, left_out, others=rest.others, partial=partial)


def _part_by_part(of_ranks: Sequence[Mapping[Place, State]]) -> tuple[dict[Key, State], set[Key]]:
    """The sums of the parts, each place once; and the states of which ranks have different values at the same place."""
    once: dict[Place, State] = {}
    differ: set[Key] = set()
    for parts in of_ranks:
        for place, state in parts.items():
            if once.setdefault(place, state) != state:
                differ.add(place[:2])
    states: dict[Key, State] = {}
    for place, part in once.items():
        states[place[:2]] = part.added_to(states.get(place[:2]))
    return {key: state for key, state in states.items() if key not in differ}, differ
