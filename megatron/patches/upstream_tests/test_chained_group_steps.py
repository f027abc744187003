# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

from megatron.core.optimizer import ChainedOptimizer


def _chain(*optimizers):
    """A chain whose optimizers have these param groups."""
    chained = ChainedOptimizer.__new__(ChainedOptimizer)
    chained.chained_optimizers = [
        SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups)) for groups in optimizers
    ]
    return chained


def _steps(chained):
    return [
        [group.get("step") for group in optimizer.optimizer.param_groups]
        for optimizer in chained.chained_optimizers
    ]


def test_empty_groups_get_the_step_of_the_others():
    """As on a pipeline stage without experts, before a save and after a load."""
    dense, experts = [{"params": [0], "step": 3}, {"params": []}], [{"params": []}, {"params": []}]
    chained = _chain(dense, experts)
    assert chained._synchronize_steps() == 3
    assert _steps(chained) == [[3, 3], [3, 3]]


def test_an_outdated_step_of_an_empty_group_is_replaced():
    chained = _chain([{"params": [0], "step": 3}], [{"params": [], "step": 1}])
    chained._synchronize_steps()
    assert _steps(chained) == [[3], [3]]
