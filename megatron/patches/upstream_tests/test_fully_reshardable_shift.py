# Copyright (c) 2025, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

DTYPE = (torch.bfloat16, torch.float32)
# Elements of each parameter, one a bucket, and of the bucket with its end padding.
BUCKETS = {"first": (5, 8), "second": (3, 8), "third": (6, 8)}


@pytest.fixture
def params():
    return {name: torch.nn.Parameter(torch.rand(numel)) for name, (numel, _) in BUCKETS.items()}


@pytest.fixture
def optimizer(params):
    buckets, index_map, start = [], {}, 0
    for bucket_id, (name, (numel, padded)) in enumerate(BUCKETS.items()):
        buckets.append(SimpleNamespace(grad_data=torch.empty(padded), numel_unpadded=numel))
        index_map[params[name]] = (start, start + numel, bucket_id)
        start += padded
    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    optimizer.gbuf_ranges = [{DTYPE: [{} for _ in buckets]}]
    optimizer.buffers = [
        SimpleNamespace(buckets=buckets, param_index_map=index_map, numel_unpadded=start - 2)
    ]
    return optimizer


def test_states_are_saved_with_their_own_parameter(optimizer, params, monkeypatch):
    gathered = {
        name: {key: torch.rand(param.numel()) for key in ("param", "exp_avg", "exp_avg_sq")}
        for name, param in params.items()
    }
    buffer = {
        key: torch.cat([states[key] for states in gathered.values()])
        for key in ("param", "exp_avg", "exp_avg_sq")
    }
    buffer["numel_unpadded"] = sum(numel for numel, _ in BUCKETS.values())
    monkeypatch.setattr(
        optimizer, "get_parameter_state_dp_zero", lambda **_: {0: {DTYPE: buffer}}, raising=False
    )
    model = {name: ShardedTensor.from_rank_offsets(name, param) for name, param in params.items()}

    saved = optimizer.sharded_param_state_fully_reshardable(model, metadata={})

    found = {tensor.key: tensor.data for states in saved.values() for tensor in states.values()}
    assert found.keys() == {
        f"optimizer.state.{key}.{name}" for name, states in gathered.items() for key in states
    }
    for name, states in gathered.items():
        for key, state in states.items():
            assert torch.equal(found[f"optimizer.state.{key}.{name}"], state), (name, key)
