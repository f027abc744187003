"""resume with main parameters stored as remainders

The optimizer stores the 16 bits that bf16 weights lack. One resumed run has remainders, the other does not.
"""

from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from trainers import megatron_training as mt
from trainers import show


def run(folder: Path) -> str:
    found = []
    for number, (saved, resumed) in enumerate([(True, False), (True, True)]):
        found += mt.results(resume, 1, folder / str(number), saved, resumed)
    return "; ".join(filter(None, found))


def resume(rank: int, folder: Path, saved: bool, resumed: bool) -> str:
    """Save after three steps, load, and compare the main parameters, then the weights one step later."""
    model, optimizer = trained(saved, range(3))
    mt.save("dp_zero_gather_scatter", model, optimizer, folder)
    of_other, other = trained(resumed, range(3, 6))
    mt.load("dp_zero_gather_scatter", of_other, other, folder)
    different = not_equal(main_params(optimizer), main_params(other))
    for one, its_optimizer in ((model, optimizer), (of_other, other)):
        mt.step(one, its_optimizer, 3)
    different += not_equal(mt.weights(model), mt.weights(of_other))
    return f"{len(different)} of 8 tensors differ, and no error" if different else ""


def trained(remainders: bool, iterations: range) -> tuple[mt.Model, mt.Optimizer]:
    import megatron.core.utils

    mt.use_inner_optimizer("fused")
    # Megatron passes the setting only to this release of Transformer Engine and later ones.
    megatron.core.utils._te_version = Version("2.1.0")
    model, optimizer = mt.build(precision_aware=True, settings={"store_param_remainders": remainders})
    megatron.core.utils._te_version = Version("0.0.0")
    for iteration in iterations:
        mt.step(model, optimizer, iteration)
    return model, optimizer


def main_params(optimizer: mt.Optimizer) -> dict[str, torch.Tensor]:
    """The main parameters in fp32, from the optimizer's memory."""
    from trainers.stub_fused_adam import joined

    found: dict[str, torch.Tensor] = {}
    own: Any = mt.inner(optimizer).optimizer
    for number, param in enumerate(param for group in own.param_groups for param in group["params"]):
        kept = own.state[param]["master_param"]
        found[str(number)] = joined(param.detach(), kept) if kept.dtype == torch.int16 else kept.detach().clone()
    return found


def not_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in one.items() if not torch.equal(tensor.flatten(), other[name].flatten())]


if __name__ == "__main__":
    show(run, "main parameters are those of the run", raises="AssertionError")
