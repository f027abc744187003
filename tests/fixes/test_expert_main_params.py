"""expert_main_params: fp32 weights that are loaded into experts reach their main parameters."""

import re
from pathlib import Path
from typing import Any

import torch

from trainers.lazy import mt
from upstream import proof

(
    test_main_parameters_of_experts_are_the_rounded_weights_or_the_load_fails,
    test_all_main_parameters_are_the_fp32_values,
) = proof(__file__, re.compile("masters are the rounded weights, and no error|AssertionError"))


# What the ranks run

RANKS = 2


def bug(folder: Path) -> str:
    return "; ".join(filter(None, map(with_chunks, (1, 2))))


def with_chunks(chunks: int) -> str:
    found = mt.results(reload, RANKS, chunks)
    errors = {error for error, _, _ in found if error}
    wrong, all_of = (sum(each[place] for each in found) for place in (1, 2))
    what = f"{chunks} chunk{'s' * (chunks > 1)}"
    if errors:
        return f"{what}: {errors.pop()}"
    return f"{what}: {wrong} of {all_of} masters are the rounded weights, and no error" if wrong else ""


def reload(rank: int, chunks: int) -> tuple[str, int, int]:
    """Load fp32 values into model chunks. Returns an error, and the numbers of wrong and of all elements."""
    from megatron.core.optimizer import get_megatron_optimizer

    built = [mt.build(make_model=mt.dense_and_expert) for _ in range(chunks)]
    models = [model for model, _ in built]
    optimizer = get_megatron_optimizer(mt.inner(built[0][1]).config, models)
    exact = [{name: torch.rand(p.shape) for name, p in named(model)} for model in models]
    for model, values in zip(models, exact, strict=True):
        mt.set_weights(model, {f"module.{name}": value for name, value in values.items()})
    names = ["model"] if chunks == 1 else [f"model{number}" for number in range(chunks)]
    try:
        optimizer.reload_model_params(state_dict=dict(zip(names, exact, strict=True)))
    except AssertionError as error:
        return f"AssertionError: {error}", 0, 0
    compared = [
        compare(one, p, values[name])
        for model, values in zip(models, exact, strict=True)
        for name, p in named(model)
        for one in optimizer.chained_optimizers
        if p in one.model_param_group_index_map
    ]
    return "", sum(wrong for wrong, _ in compared), sum(count for _, count in compared)


def named(model: Any) -> list[tuple[str, Any]]:
    return [(name.removeprefix("module."), p) for name, p in model.named_parameters()]


def compare(optimizer: Any, parameter: Any, exact: torch.Tensor) -> tuple[int, int]:
    """The numbers of wrong elements and of all elements in this rank's shard of a main parameter."""
    group, order = optimizer.model_param_group_index_map[parameter]
    part = optimizer._get_model_param_range_map(parameter)["param"]
    master = optimizer.optimizer.param_groups[group]["params"][order].detach().cpu()
    return int((master != exact.flatten()[part.start : part.end]).sum()), master.numel()
