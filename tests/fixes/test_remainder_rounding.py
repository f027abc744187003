"""remainder_rounding: main parameters are loaded as remainders of bf16 weights."""

from pathlib import Path
from typing import Any

import torch

from trainers.ranks import free_port, results
from upstream import proof

test_main_parameters_are_others_after_a_load, test_main_parameters_are_the_saved_ones = proof(
    __file__, "masters differ from the saved ones"
)


# What the ranks run

NUMEL = 2**22


def bug(folder: Path) -> str:
    from trainers import stub_apex

    stub_apex.install()
    return str(results(resume, 1, free_port())[0])


def resume(rank: int, port: int) -> str:
    """Save after two steps, load into another model, and save that model."""
    torch.distributed.init_process_group("nccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=1)
    weight, optimizer = make(seed=0)
    for iteration in range(2):
        torch.manual_seed(100 + iteration)
        weight.grad = torch.randn(NUMEL).bfloat16().cuda()
        optimizer.step()
        optimizer.zero_grad()
    saved = optimizer.state_dict()
    masters = saved["state"][0]["param"].clone()
    resumed, of_resumed = make(seed=1)
    with torch.no_grad():
        resumed.copy_(masters)
    of_resumed.load_state_dict(saved)
    found = of_resumed.state_dict()["state"][0]["param"]
    error = (found - masters).abs() / masters.abs()
    wrong = int(error.count_nonzero())
    if not wrong:
        return ""
    return f"{wrong} of {NUMEL} masters differ from the saved ones, by up to {error.max():.2%}, and no error"


def make(seed: int) -> tuple[Any, Any]:
    from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam

    torch.manual_seed(seed)
    weight = torch.nn.Parameter((torch.randn(NUMEL) * 0.02).bfloat16().cuda())
    optimizer = DistributedFusedAdam(
        [weight],
        lr=1e-4,
        param_sync_dtype=torch.bfloat16,
        store_params=False,
        store_param_remainders=True,
        overlap_grad_sync=False,
    )
    return weight, optimizer
