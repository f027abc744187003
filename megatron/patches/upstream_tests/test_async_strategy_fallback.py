# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

import sys

import pytest

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy


def test_mcore_is_used_where_nvrx_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)

    with pytest.warns(UserWarning, match="nvidia-resiliency-ext"):
        strategy, modules = get_async_strategy("nvrx")

    assert strategy == "mcore"
    assert modules["AsyncCallsQueue"] is AsyncCallsQueue


def test_unknown_strategies_are_refused():
    with pytest.raises(TypeError):
        get_async_strategy("other")
