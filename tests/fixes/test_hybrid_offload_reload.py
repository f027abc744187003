"""hybrid_offload_reload: weights loaded into a model under the real hybrid CPU-offload optimizer, then one step."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from upstream import affected, numbers, run_lines, shown, tree, with_fix, without_fix

FIX = "hybrid_offload_reload"
AFFECTED = affected(FIX)
WEIGHTS = ["module.a.bias", "module.a.weight", "module.b.bias", "module.b.weight"]  # bf16
NATIVE = "module.scale"  # fp32

# precision-aware, offload fraction, overlap
COMBINATIONS = list(product((False, True), (0.0, 0.5, 1.0), (False, True)))
Found = dict[tuple[bool, float, bool], dict[str, Any]]


def load_and_step(version: str, delivery: str, *options: str) -> Found:
    """Parameters that lost the loaded weights, and copies that are stale after the reload, by combination."""
    lines = run_lines("hybrid_reload", *options, tree=tree("megatron-core", version), delivery=delivery)
    found = {(line["precision_aware"], line["fraction"], line["overlap"]): line for line in lines}
    assert list(found) == COMBINATIONS
    return found


@without_fix(AFFECTED)
def test_upstream_steps_back_to_the_initial_weights(version: str, delivery: str) -> None:
    found = load_and_step(version, delivery)
    for (precision_aware, fraction, _), result in found.items():
        if not precision_aware:
            assert set(result["lost"]) >= set(WEIGHTS)
            assert "parameter" in result["stale"]
        elif numbers(version) < (0, 13):
            assert set(result["lost"]) >= set(WEIGHTS)  # 0.12 does not even refresh the working copies
        elif fraction == 1.0:
            assert result["lost"] == [NATIVE]
            assert result["stale"] == ["CPU clone"]


@with_fix(AFFECTED)
@pytest.mark.parametrize(
    "options", [(), ("--steps-before", "2"), ("--state-dict",)], ids=["fresh", "after steps", "state dict"]
)
def test_every_copy_holds_the_loaded_weights_and_keeps_them(
    version: str, delivery: str, options: tuple[str, ...]
) -> None:
    if options == ("--state-dict",) and numbers(version) < (0, 14):
        pytest.skip("reload_model_params has no state_dict before 0.14")
    found = load_and_step(version, delivery, *options)
    assert {key: (result["lost"], result["stale"]) for key, result in found.items()} == {
        key: ([], []) for key in COMBINATIONS
    }


@without_fix(AFFECTED)
def test_megatron_fsdp_steps_back_to_the_initial_weights(version: str, delivery: str) -> None:
    assert "starts from the initial weights, and no error" in shown(__file__, version, delivery)


@with_fix(AFFECTED)
def test_megatron_fsdp_keeps_the_loaded_weights(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# What the process runs


def bug(folder: Path) -> str:
    """Step after a load. Megatron-FSDP's optimizer has no shard map: its parameters are the inner optimizer's."""
    import torch
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    shard = torch.nn.Parameter(torch.zeros(6).cuda())
    inner = HybridDeviceOptimizer(
        [{"params": [shard], "lr": 0.0, "weight_decay": 0.0}],
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=False,
    )
    optimizer = object.__new__(DistributedOptimizer)
    optimizer.optimizer, optimizer.is_stub_optimizer = inner, False
    with torch.no_grad():
        shard.fill_(0.75)  # simulates a load of weights
    optimizer.reload_model_params()
    shard.grad = torch.ones_like(shard)
    inner.step()
    return "" if shard.eq(0.75).all() else "the step after a load starts from the initial weights, and no error"
