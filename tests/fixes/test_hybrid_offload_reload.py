"""hybrid_offload_reload: weights loaded into a model under the real hybrid CPU-offload optimizer, then one step."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from trainers.lazy import mt
from upstream import affected, called, numbers, shown, with_fix, without_fix

FIX = "hybrid_offload_reload"
AFFECTED = affected(FIX)
WEIGHTS = ["module.a.bias", "module.a.weight", "module.b.bias", "module.b.weight"]  # bf16
NATIVE = "module.scale"  # fp32
VALUE = 0.7501

# precision-aware, offload fraction, overlap
COMBINATIONS = list(product((False, True), (0.0, 0.5, 1.0), (False, True)))
Found = dict[tuple[bool, float, bool], dict[str, Any]]


def load_and_step(version: str, delivery: str, steps_before: int = 0, state_dict: bool = False) -> Found:
    """Parameters that lost the loaded weights, and copies that are stale after the reload, by combination."""
    on: dict[str, Any] = {"version": version, "delivery": delivery, "layout": [2]}
    lines = called(__file__, "combinations", steps_before, state_dict, **on)[0]
    return dict(zip(COMBINATIONS, lines, strict=True))


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
    ("steps_before", "state_dict"), [(0, False), (2, False), (0, True)], ids=["fresh", "after steps", "state dict"]
)
def test_every_copy_holds_the_loaded_weights_and_keeps_them(
    version: str, delivery: str, steps_before: int, state_dict: bool
) -> None:
    if state_dict and numbers(version) < (0, 14):
        pytest.skip("reload_model_params has no state_dict before 0.14")
    found = load_and_step(version, delivery, steps_before, state_dict)
    assert {key: (result["lost"], result["stale"]) for key, result in found.items()} == {
        key: ([], []) for key in COMBINATIONS
    }


@without_fix(AFFECTED)
def test_megatron_fsdp_steps_back_to_the_initial_weights(version: str, delivery: str) -> None:
    assert "starts from the initial weights, and no error" in shown(__file__, version, delivery)


@with_fix(AFFECTED)
def test_megatron_fsdp_keeps_the_loaded_weights(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# What the ranks run


def bug(folder: Path) -> str:
    """Step after a load. Megatron-FSDP's optimizer has no shard map: its parameters are the inner optimizer's."""
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


def combinations(rank: int, folder: Path, steps_before: int, state_dict: bool) -> list[dict[str, list[str]]]:
    """Load weights, reload, and take one step at learning rate 0, in each of COMBINATIONS.

    Returns the parameters that did not keep the loaded weights, and the copies in the optimizer that do not hold them,
    on any rank. With `state_dict` reload_model_params gets the weights, in fp32.
    """
    found = []
    for combination in COMBINATIONS:
        of_ranks = mt.gathered(reloaded(*combination, steps_before, state_dict))
        found.append({key: sorted({name for one in of_ranks for name in one[key]}) for key in ("lost", "stale")})
    return found


def reloaded(
    precision_aware: bool, fraction: float, overlap: bool, steps_before: int, state_dict: bool
) -> dict[str, list[str]]:
    model, optimizer = mt.build(
        offload_fraction=fraction, precision_aware=precision_aware, overlap=overlap, native_fp32=True
    )
    for iteration in range(steps_before):
        mt.step(model, optimizer, iteration)
    # Not a bf16 number: the model rounds it, a state dict in fp32 does not.
    exact = {name: torch.full_like(value, VALUE) for name, value in mt.weights(model).items()}
    mt.set_weights(model, exact)
    loaded = mt.weights(model)
    given = {"model": {name.removeprefix("module."): value for name, value in exact.items()}}
    optimizer.reload_model_params(**({"state_dict": given} if state_dict else {}))
    stale = stale_copies(mt.inner(optimizer), VALUE if state_dict else float(torch.tensor(VALUE).bfloat16()))
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
    mt.step(model, optimizer, 0)
    return {"lost": [name for name, own in mt.weights(model).items() if not own.equal(loaded[name])], "stale": stale}


def stale_copies(optimizer: Any, expected: float) -> list[str]:
    """The kinds of copies without the loaded value: exact in fp32 parameters, `expected` in others."""
    hybrid = optimizer.optimizer
    natives = {p.data_ptr() for group in optimizer.shard_fp32_groups for p in group}
    stale = set()
    for param in (param for group in hybrid.param_groups for param in group["params"]):
        copies = {
            "parameter": param,
            "CPU clone": hybrid.gpu_params_map_cpu_copy.get(param),
            "fp32 working copy": hybrid.param_to_fp32_param.get(param),
            "main parameter in the state": hybrid.state.get(param, {}).get("master_param"),
        }
        value = VALUE if param.data_ptr() in natives else expected
        stale |= {
            kind for kind, copy in copies.items() if copy is not None and not copy.eq(copy.new_tensor(value)).all()
        }
    return sorted(stale)
