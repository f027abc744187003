# Copyright (c) 2025, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def test_a_format_is_chosen_that_can_be_saved(monkeypatch):
    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    optimizer.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    monkeypatch.setattr(optimizer, "state_dict", dict, raising=False)
    for name in ("dp_reshardable", "fully_reshardable", "dp_zero", "fs_model_space"):
        monkeypatch.setattr(
            optimizer, f"sharded_param_state_{name}", lambda *_, name=name: name, raising=False
        )

    chosen = optimizer.sharded_state_dict({})

    # Model space is made of flattened ranges, which `ShardedTensor` refuses.
    assert chosen["param_state_sharding_type"] == chosen["param_state"] == "dp_reshardable"
