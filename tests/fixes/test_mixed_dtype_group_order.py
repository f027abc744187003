"""mixed_dtype_group_order: a param group of several dtypes is loaded on fewer ranks."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from upstream import affected, newest_affected, run_lines, shown, tree, with_fix, without_fix

RELEASES = affected("mixed_dtype_group_order")


@without_fix(RELEASES)
def test_parameters_get_the_states_of_others(version: str, delivery: str) -> None:
    assert "states differ, and no error" in shown(__file__, version, delivery)


@with_fix(RELEASES)
def test_each_parameter_has_its_own_states(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# Further cases

NEWEST = newest_affected("mixed_dtype_group_order")[1]
REFUSED = "ValueError: Cannot tell whose states were loaded"


def line(delivery: str, what: str, folder: Path, *options: str, ranks: int) -> dict[str, object]:
    where = {"tree": tree("megatron-core", NEWEST), "delivery": delivery}
    (found,) = run_lines("mixed_groups", what, folder, "--ranks", str(ranks), *options, **where)
    return found


@pytest.mark.parametrize("kind", ["fully_reshardable", "torch"])
def test_what_a_release_saved_is_put_right_on_as_many_ranks_and_refused_on_others(kind: str, tmp_path: Path) -> None:
    options = ("--format", kind)
    assert line("none", "save", tmp_path, *options, ranks=2) == {"differ": [], "error": ""}
    assert line("hook", "load", tmp_path, *options, ranks=2) == {"differ": [], "error": ""}
    assert str(line("hook", "load", tmp_path, *options, ranks=1)["error"]).startswith(REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fully_reshardable", "torch"])
def test_it_loads_on_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    for saved_on in (1, 2):
        folder = tmp_path / str(saved_on)
        folder.mkdir()
        line("hook", "save", folder, "--format", kind, ranks=saved_on)
        for ranks in (1, 2):
            found = line("hook", "load", folder, "--format", kind, ranks=ranks)
            assert found == {"differ": [], "error": ""}, (saved_on, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["none", "hook"])
def test_equal_weights_with_different_moments_are_refused(saved: str, tmp_path: Path) -> None:
    """Such states, as at a learning rate of 0, are refused: their owner is unknown."""
    assert line(saved, "save", tmp_path, "--alike", ranks=2)["error"] == ""
    assert str(line("hook", "load", tmp_path, "--alike", ranks=2)["error"]).startswith(REFUSED)


# What the ranks run

FORMAT = "fully_reshardable"
STATES = ("param", "exp_avg", "exp_avg_sq")


def bug(folder: Path) -> str:
    """Save on two ranks, and load on one."""
    from trainers import megatron_training as mt

    mt.results(save, 2, folder)
    different = mt.results(load, 1, folder)[0]
    return f"{len(different)} of 9 states differ, and no error" if different else ""


def network(config: Any, dtype: torch.dtype, native_fp32: bool) -> Any:
    from trainers import megatron_training as mt

    tiny = mt.tiny_model(config, dtype, native_fp32)
    del tiny.a, tiny.b
    tiny.a = torch.nn.Module()
    tiny.a.weight = torch.nn.Parameter(torch.rand(64).to(dtype))
    tiny.bias = torch.nn.Parameter(torch.rand(64).to(dtype))
    tiny.gain = torch.nn.Parameter(torch.rand(64))
    tiny.forward = lambda x: (x.repeat(1, 4) * tiny.a.weight + tiny.bias).float() * tiny.gain
    return tiny


def trained(start: int) -> tuple[Any, Any]:
    from trainers import megatron_training as mt

    mt.use_inner_optimizer("fused")
    if not hasattr(numpy, "product"):
        vars(numpy)["product"] = numpy.prod  # 0.11 calls it, but NumPy 2 removed it
    model, optimizer = mt.build(make_model=network)
    for iteration in range(start, start + 3):
        mt.step(model, optimizer, iteration)
    return model, optimizer


def save(rank: int, folder: Path) -> None:
    from trainers import megatron_training as mt

    model, optimizer = trained(0)
    mt.save(FORMAT, model, optimizer, folder / "checkpoint")
    states = live_states(model, optimizer)
    if rank == 0:
        torch.save(states, folder / "states.pt")


def load(rank: int, folder: Path) -> list[str]:
    from trainers import megatron_training as mt

    model, optimizer = trained(3)
    mt.load(FORMAT, model, optimizer, folder / "checkpoint")
    saved, found = torch.load(folder / "states.pt"), live_states(model, optimizer)
    return [key for key, state in saved.items() if not torch.equal(state, found[key])]


def live_states(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Complete main parameters and moments, looked up as a step does, by pairs of parameter and shard."""
    from trainers import megatron_training as mt

    own = mt.inner(optimizer)
    pairs = [
        pair
        for params, shards in (
            (own.model_float16_groups, own.shard_fp32_from_float16_groups),
            (own.model_fp32_groups, own.shard_fp32_groups),
        )
        for group in zip(params, shards, strict=True)
        for pair in zip(*group, strict=True)
    ]
    states = {}
    for name, param in model.named_parameters():
        for key in STATES:
            full = torch.zeros(param.numel())
            for shard in (shard for other, shard in pairs if other is param):
                owned = own._get_model_param_range_map(param)["param"]
                state = shard if key == "param" else own.optimizer.state[shard][key]
                full[owned.start : owned.end] = state.detach()
            dist.all_reduce(full)
            states[f"{name}.{key}"] = full
    return states
