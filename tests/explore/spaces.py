"""What is explored: of each package, what is drawn, and the program that trains and loads it."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from explore import deepspeed_space, megatron_space

Case = dict[str, Any]


@dataclass(frozen=True)
class Space:
    distribution: str  # on the index
    program: str
    own: Any  # the module of what is drawn
    drawn: Callable[[str, str], Case]  # by a seed, for a release

    def described(self, case: Case) -> str:
        """What is not as in a plain case, in a line."""
        return str(self.own.described(case))

    def loaded(self, case: Case) -> str:
        """Which checkpoint, and what of it."""
        return str(self.own.loaded(case))

    def steps_to_plain(self, case: Case) -> list[Case]:
        """What could be plainer in a case, each by itself."""
        return list(self.own.steps_to_plain(case))

    @property
    def plain(self) -> Case:
        """A training of which nothing is drawn."""
        return dict(self.own.PLAIN)


SPACES = {
    "deepspeed": Space("deepspeed", "explore_deepspeed", deepspeed_space, deepspeed_space.drawn),
    "megatron": Space("megatron-core", "explore_megatron", megatron_space, megatron_space.drawn),
}


def space_of(case: Case) -> Space:
    return SPACES[case["package"]]


def complete(case: Case) -> Case:
    """A case of which what is plain was left out."""
    own = space_of(case).own
    return {**own.PLAIN_CASE, **case, "run": own.PLAIN | case["run"], "load": own.PLAIN_LOAD | case["load"]}


def compact(case: Case) -> Case:
    """A case without what is plain."""
    own = space_of(case).own
    plain: Case = {**own.PLAIN_CASE, "run": own.PLAIN, "load": own.PLAIN_LOAD}

    def left(values: Case, of: Case) -> Case:
        return {name: value for name, value in values.items() if name not in of or value != of[name]}

    return {**left(case, plain), **{part: left(case[part], plain[part]) for part in ("run", "load")}}


def plainer(case: Case, steps: Iterable[Case]) -> Case:
    """A case after these steps."""
    made = copy.deepcopy(case)
    for step in steps:
        made = {**made, **step, "run": made["run"] | step.get("run", {}), "load": made["load"] | step.get("load", {})}
    return made
