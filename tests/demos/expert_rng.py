"""resume random numbers of experts"""

from pathlib import Path

import torch

from trainers import cases, megatron_lm, show
from trainers import megatron_training as mt

# Number of ranks, tensor-parallel size, expert-parallel size, format.
RUNS = (
    (2, 1, 2, "torch_dist"),
    (4, 1, 4, "torch_dist"),
    (4, 2, 2, "torch_dist"),
    (2, 1, 2, "fsdp_dtensor"),
    (4, 1, 4, "fsdp_dtensor"),
    (4, 2, 2, "fsdp_dtensor"),
)


def run(folder: Path) -> str:
    megatron_lm.import_training()
    return "; ".join(filter(None, (in_layout(folder / str(n), *one) for n, one in enumerate(cases(RUNS)))))


def in_layout(folder: Path, ranks: int, tensor: int, expert: int, name: str) -> str:
    right: list[bool] = mt.results(resume, ranks, folder, tensor, expert, name)
    wrong = [rank for rank, same in enumerate(right) if not same]
    if not wrong:
        return ""
    return (
        f"TP {tensor}, EP {expert}, {name}: {len(wrong)} of {ranks} ranks go on with other random numbers"
        " for their experts than they were saved with, and no error"
    )


def resume(rank: int, folder: Path, tensor: int, expert: int, name: str) -> bool:
    """Whether a resumed run draws the same random numbers for its experts as the saved run."""
    checkpointing = megatron_lm.import_training()
    fsdp = name == "fsdp_dtensor"  # its RNG code does not depend on Megatron-FSDP
    args = megatron_lm.arguments(folder, tensor, expert, ckpt_format=name, use_megatron_fsdp=fsdp)
    megatron_lm.start(tensor, expert)
    model = mt.tiny_model(mt.transformer_config(torch.bfloat16), torch.bfloat16, False)
    draw(rank + 1)
    megatron_lm.save(checkpointing, model, args)
    goes_on = draw()
    megatron_lm.start(tensor, expert)
    megatron_lm.load(checkpointing, model, args)
    return bool(torch.equal(goes_on, draw()))


def draw(times: int = 1) -> torch.Tensor:
    """The next random numbers for this rank's experts, drawn like those of the router and dropout."""
    from megatron.core.tensor_parallel import random

    with random.get_cuda_rng_tracker().fork(random.get_expert_parallel_rng_tracker_name()):
        for _ in range(times):
            drawn = torch.rand(8, device="cuda")
    return drawn.cpu()


if __name__ == "__main__":
    show(run, "every rank goes on with its own random numbers for its experts")
