"""mixed_dtype_group_order: a param group of several dtypes is loaded on fewer ranks."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from trainers.lazy import mt
from upstream import called, newest_affected, proof

test_parameters_get_the_states_of_others, test_each_parameter_has_its_own_states = proof(
    __file__, "states differ, and no error"
)


# Further cases

NEWEST = newest_affected("mixed_dtype_group_order")[1]
REFUSED = "ValueError: Cannot tell whose states were loaded"
FORMATS = ("fully_reshardable", "torch")


def run(delivery: str, function: str, folder: Path, *arguments: object) -> str:
    return str(called(__file__, function, *arguments, version=NEWEST, delivery=delivery, folder=folder))


@pytest.mark.parametrize("kind", FORMATS)
def test_what_a_release_saved_is_put_right_on_as_many_ranks_and_refused_on_others(kind: str, tmp_path: Path) -> None:
    run("none", "save_on", tmp_path, 2, kind)
    assert run("hook", "load_on", tmp_path, 2, kind) == ""
    assert run("hook", "load_on", tmp_path, 1, kind).startswith(REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("saved_on", [1, 2])
def test_it_loads_on_any_number_of_ranks(saved_on: int, kind: str, tmp_path: Path) -> None:
    run("hook", "save_on", tmp_path, saved_on, kind)
    assert [run("hook", "load_on", tmp_path, ranks, kind) for ranks in (1, 2)] == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["none", "hook"])
def test_equal_weights_with_different_moments_are_refused(saved: str, tmp_path: Path) -> None:
    """Such states, as at a learning rate of 0, are refused: their owner is unknown."""
    run(saved, "save_on", tmp_path, 2, FORMATS[0], True)
    assert run("hook", "load_on", tmp_path, 2, FORMATS[0], True).startswith(REFUSED)


# What the ranks run


def bug(folder: Path) -> str:
    save_on(folder, 2)
    return load_on(folder, 1)


def save_on(folder: Path, ranks: int, kind: str = FORMATS[0], alike: bool = False) -> None:
    mt.results(save, ranks, folder, kind, alike)


def load_on(folder: Path, ranks: int, kind: str = FORMATS[0], alike: bool = False) -> str:
    return str(mt.results(load, ranks, folder, kind, alike)[0])


def save(rank: int, folder: Path, kind: str, alike: bool) -> None:
    model, optimizer = trained(0, alike)
    mt.save(kind, model, optimizer, folder / "checkpoint")
    states = live(model, optimizer)
    if rank == 0:
        torch.save(states, folder / "states.pt")


def load(rank: int, folder: Path, kind: str, alike: bool) -> str:
    model, optimizer = trained(3, alike)
    mt.load(kind, model, optimizer, folder / "checkpoint")
    return mt.how_many_differ(torch.load(folder / "states.pt"), live(model, optimizer))


def trained(start: int, alike: bool) -> tuple[Any, Any]:
    """A run after three steps; with `alike` all weights are and stay 1, but moments differ."""

    def network(config: Any, dtype: torch.dtype, native_fp32: bool) -> Any:
        tiny = mt.tiny_model(config, dtype, native_fp32)
        del tiny.a, tiny.b
        make = torch.ones if alike else torch.rand
        tiny.a = torch.nn.Module()
        tiny.a.weight = torch.nn.Parameter(make(64).to(dtype))
        tiny.bias = torch.nn.Parameter(make(64).to(dtype))
        tiny.gain = torch.nn.Parameter(make(64))
        tiny.forward = lambda x: (x.repeat(1, 4) * tiny.a.weight + tiny.bias).float() * tiny.gain
        return tiny

    mt.use_inner_optimizer("fused")
    if not hasattr(numpy, "product"):
        vars(numpy)["product"] = numpy.prod  # 0.11 calls it, but NumPy 2 removed it
    model, optimizer = mt.build(make_model=network, settings={"lr": 0.0} if alike else {})
    for iteration in range(start, start + 3):
        mt.step(model, optimizer, iteration)
    return model, optimizer


def live(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Weights, and complete main parameters and moments, looked up as a step does, by pairs of parameter and shard."""
    from trainers import megatron_state

    found = megatron_state.live(megatron_state.Run(model, optimizer, None))
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
