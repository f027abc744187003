"""resume fp16 weights with their fp32 main parameters"""

import copy
from pathlib import Path

from trainers import show, stub_apex

stub_apex.install()
import torch  # noqa: E402  after the stub is installed
from apex.optimizers import FusedAdam  # noqa: E402

LR = 1e-4


def run(folder: Path) -> str:
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


def make(seed: int) -> tuple[torch.nn.Linear, FusedAdam]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(64, 64, bias=False, dtype=torch.float16, device="cuda")
    return model, FusedAdam(model.parameters(), lr=LR, capturable=True, master_weights=True)


def step(model: torch.nn.Linear, optimizer: FusedAdam, iteration: int) -> None:
    torch.manual_seed(100 + iteration)
    model.weight.grad = torch.randn(64, 64).half().cuda()
    optimizer.step()


if __name__ == "__main__":
    show(run, "resumes bit for bit")
