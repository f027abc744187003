"""What is explored: of each package, what is drawn, and the program that trains and loads it."""

from collections.abc import Callable
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


SPACES = {
    "deepspeed": Space(
        "deepspeed",
        "explore_deepspeed",
        lambda seed, _: deepspeed_space.drawn(seed),
        deepspeed_space.steps_to_plain,
        deepspeed_space.described,
        deepspeed_space.loaded,
    ),
    "megatron": Space(
        "megatron-core",
        "explore_megatron",
        megatron_space.drawn,
        megatron_space.steps_to_plain,
        megatron_space.described,
        megatron_space.loaded,
    ),
}


def space_of(case: Case) -> Space:
    return SPACES[case["package"]]
