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
    drawn: Callable[[str, str], Case]  # by a seed, for a release
    steps_to_plain: Callable[[Case], list[Case]]
    described: Callable[[Case], str]
    loaded: Callable[[Case], str]
    plain: Case  # of a training,
    plain_load: Case  # a load,
    plain_case: Case  # and the rest


SPACES = {
    "deepspeed": Space(
        "deepspeed",
        "explore_deepspeed",
        lambda seed, _: deepspeed_space.drawn(seed),
        deepspeed_space.steps_to_plain,
        deepspeed_space.described,
        deepspeed_space.loaded,
        deepspeed_space.PLAIN,
        deepspeed_space.PLAIN_LOAD,
        deepspeed_space.PLAIN_CASE,
    ),
    "megatron": Space(
        "megatron-core",
        "explore_megatron",
        megatron_space.drawn,
        megatron_space.steps_to_plain,
        megatron_space.described,
        megatron_space.loaded,
        megatron_space.PLAIN,
        megatron_space.PLAIN_LOAD,
        megatron_space.PLAIN_CASE,
    ),
}


def space_of(case: Case) -> Space:
    return SPACES[case["package"]]


def complete(case: Case) -> Case:
    """A case of which what is plain was left out."""
    space = space_of(case)
    return {**space.plain_case, **case, "run": space.plain | case["run"], "load": space.plain_load | case["load"]}


def plainer(case: Case, steps: Iterable[Case]) -> Case:
    """A case after these steps."""
    made = copy.deepcopy(case)
    for step in steps:
        made = {**made, **step, "run": made["run"] | step.get("run", {}), "load": made["load"] | step.get("load", {})}
    return made
