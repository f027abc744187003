"""fused_adam_masters: fp16 weights resume with their fp32 main parameters."""

import copy
from pathlib import Path
from typing import Any

import torch

from upstream import proof

test_the_first_step_after_a_resume_moves_weights_by_more_than_a_step, test_a_resume_goes_on_bit_for_bit = proof(
    __file__, "the first step after the resume moved a weight by"
)


# What the ranks run

LR = 1e-4


def bug(folder: Path) -> str:
    from trainers import stub_apex

    stub_apex.install()
    model, optimizer = make(seed=0)
    for iteration in range(3):
        step(model, optimizer, iteration)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "saved")
    saved = torch.load(folder / "saved", weights_only=False)
    resumed, of_resumed = make(seed=1)  # as after a restart, with other initial weights
    resumed.load_state_dict(saved["model"])
    of_resumed.load_state_dict(saved["optimizer"])
    before = copy.deepcopy(resumed)
    step(model, optimizer, 3)
    step(resumed, of_resumed, 3)
    if torch.equal(model.weight, resumed.weight):
        return ""
    moved = (resumed.weight - before.weight).abs().max().item()
    return f"the first step after the resume moved a weight by {moved:.3f} at a learning rate of {LR}, and no error"


def make(seed: int) -> tuple[Any, Any]:
    from apex.optimizers import FusedAdam

    torch.manual_seed(seed)
    model = torch.nn.Linear(64, 64, bias=False, dtype=torch.float16, device="cuda")
    return model, FusedAdam(model.parameters(), lr=LR, capturable=True, master_weights=True)


def step(model: Any, optimizer: Any, iteration: int) -> None:
    torch.manual_seed(100 + iteration)
    model.weight.grad = torch.randn(64, 64).half().cuda()
    optimizer.step()
