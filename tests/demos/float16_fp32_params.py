"""save an fp32 parameter among bf16 ones

The optimizer is not distributed. The parameter is between bf16 ones, like the bias of a router.
"""

from functools import partial
from pathlib import Path

import torch

from trainers import megatron_training as mt


def resume(rank: int, folder: Path) -> str:
    """Save after three steps, load into another run, and compare both two steps later."""
    mt.use_inner_optimizer("fused")
    make = partial(mt.build, native_fp32=True, settings={"use_distributed_optimizer": False})
    model, optimizer = make()
    for iteration in range(3):
        mt.step(model, optimizer, iteration)
    mt.save("default", model, optimizer, folder)
    resumed, of_resumed = make()
    mt.step(resumed, of_resumed, 9)
    mt.load("default", resumed, of_resumed, folder)
    for iteration in range(3, 5):
        mt.step(model, optimizer, iteration)
        mt.step(resumed, of_resumed, iteration)
    expected, found = ({**mt.weights(m), **states(o)} for m, o in ((model, optimizer), (resumed, of_resumed)))
    return mt.how_many_differ(expected, found)


def states(optimizer: mt.Optimizer) -> dict[str, torch.Tensor]:
    """Main parameters and moments, by their index in the optimizer."""
    own = mt.inner(optimizer).optimizer
    params = [param for group in own.param_groups for param in group["params"]]
    found = {f"{n}.param": param.detach().float() for n, param in enumerate(params)}
    moments = ("exp_avg", "exp_avg_sq")
    return found | {f"{n}.{key}": own.state[param][key] for n, param in enumerate(params) for key in moments}


if __name__ == "__main__":
    mt.show_result(
        resume,
        1,
        "saved; resumes bit for bit",
        raises=("AssertionError", "ValueError: Param id", "KeyError"),
    )
