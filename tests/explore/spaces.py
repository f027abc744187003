"""The spaces to explore. Each package has a module that draws cases and a program that trains and loads."""

import copy
from collections.abc import Iterable
from typing import Any

from explore import deepspeed_space, megatron_space
from explore.damaging import OTHER_STEP

Case = dict[str, Any]
SPACES: dict[str, Any] = {"deepspeed": deepspeed_space, "megatron": megatron_space}


def space_of(case: Case) -> Any:
    return SPACES[case["package"]]


def complete(case: Case) -> Case:
    """Add the omitted plain options to a case."""
    own = space_of(case)
    return {**own.PLAIN_CASE, **case, "run": own.PLAIN | case["run"], "load": own.PLAIN_LOAD | case["load"]}


def compact(case: Case) -> Case:
    """Remove the plain options from a case."""
    own = space_of(case)
    plain: Case = {**own.PLAIN_CASE, "run": own.PLAIN, "load": own.PLAIN_LOAD}

    def left(values: Case, of: Case) -> Case:
        return {name: value for name, value in values.items() if name not in of or value != of[name]}

    return {**left(case, plain), **{part: left(case[part], plain[part]) for part in ("run", "load")}}


def described(case: Case) -> str:
    """Describe the differences from a plain case in one line."""
    left, own = compact(case), space_of(case)
    words = [own.loaded(case), f"{case['ranks']} ranks"]
    words += [_word(name, value) for name, value in left["run"].items()]
    words += [_word(name, left[name]) for name in own.PLAIN_CASE if name in left]
    same = {**case, **case["run"]}
    words += [f"load: {_word(name, value)}" for name, value in left["load"].items() if same.get(name) != value]
    return ", ".join(words)


def _word(name: str, value: Any) -> str:
    return name if value is True else f"{name} {value}"


def steps_to_plain(case: Case) -> list[Case]:
    """The steps that each make one option of the run, the load or the case plainer.

    If steps exclude each other, the plainest step comes last.
    """
    own, run, load = space_of(case), case["run"], case["load"]
    found: list[Case] = [{"run": {name: value}} for name, value in own.HALFWAY.items() if run[name] > value]
    of_run = {name: value for name, value in own.PLAIN.items() if name not in own.LAYOUT}
    of_load = {name: value for name, value in own.PLAIN_LOAD.items() if name not in own.fixed(load)}
    found += [{"run": {name: value}} for name, value in of_run.items() if run[name] != value]
    found += [{"load": {name: value}} for name, value in of_load.items() if load[name] != value]
    if case["two_saves"]:
        plainer_load = {"tag": "first"} | ({"damage": ""} if load["damage"] == OTHER_STEP else {})
        found.append({**own.PLAIN_CASE, "load": plainer_load})
    return [*found, *own.smaller(case)]


def plainer(case: Case, steps: Iterable[Case]) -> Case:
    """Apply these steps to a case."""
    made = copy.deepcopy(case)
    for step in steps:
        made = {**made, **step, "run": made["run"] | step.get("run", {}), "load": made["load"] | step.get("load", {})}
    return made
