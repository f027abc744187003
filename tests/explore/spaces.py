"""The spaces to explore. Each package has a module that draws cases and a program that trains and loads."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from explore import deepspeed_space, megatron_space

Case = dict[str, Any]


@dataclass(frozen=True)
class Space:
    distribution: str  # the name on the package index
    program: str
    own: Any  # the module that defines the space
    drawn: Callable[[str, str], Case]  # draws a case from a seed for a release

    def described(self, case: Case) -> str:
        """Describe the differences from a plain case in one line."""
        return str(self.own.described(case))

    def loaded(self, case: Case) -> str:
        """Name the loaded checkpoint and its loaded parts."""
        return str(self.own.loaded(case))

    def steps_to_plain(self, case: Case) -> list[Case]:
        """The steps that each make one option of a case plainer."""
        return list(self.own.steps_to_plain(case))

    @property
    def plain(self) -> Case:
        """The options of a training before any draw."""
        return dict(self.own.PLAIN)


SPACES = {
    "deepspeed": Space("deepspeed", "explore_deepspeed", deepspeed_space, deepspeed_space.drawn),
    "megatron": Space("megatron-core", "explore_megatron", megatron_space, megatron_space.drawn),
}


def space_of(case: Case) -> Space:
    return SPACES[case["package"]]


def complete(case: Case) -> Case:
    """Add the omitted plain options to a case."""
    own = space_of(case).own
    return {**own.PLAIN_CASE, **case, "run": own.PLAIN | case["run"], "load": own.PLAIN_LOAD | case["load"]}


def compact(case: Case) -> Case:
    """Remove the plain options from a case."""
    own = space_of(case).own
    plain: Case = {**own.PLAIN_CASE, "run": own.PLAIN, "load": own.PLAIN_LOAD}

    def left(values: Case, of: Case) -> Case:
        return {name: value for name, value in values.items() if name not in of or value != of[name]}

    return {**left(case, plain), **{part: left(case[part], plain[part]) for part in ("run", "load")}}


def plainer(case: Case, steps: Iterable[Case]) -> Case:
    """Apply these steps to a case."""
    made = copy.deepcopy(case)
    for step in steps:
        made = {**made, **step, "run": made["run"] | step.get("run", {}), "load": made["load"] | step.get("load", {})}
    return made
