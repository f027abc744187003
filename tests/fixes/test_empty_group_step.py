"""empty_group_step: a param group that is empty on rank 0 goes on at its step."""

from pathlib import Path
from typing import Any

import torch

from trainers.lazy import mt
from upstream import proof

test_the_group_starts_again_at_another_step, test_each_group_goes_on_at_its_step = proof(
    __file__, "the groups go on at the steps"
)


# What the ranks run

FORMAT, RANKS = "dp_zero_gather_scatter", 2


def bug(folder: Path) -> str:
    return next((wrong for wrong in mt.results(resumes, RANKS, folder / "checkpoint") if wrong), "")


def resumes(rank: int, checkpoint: Path) -> str:
    mt.use_inner_optimizer("fused")
    model, optimizer = mt.build(make_model=biases_last)
    for iteration in range(2):
        mt.step(model, optimizer, iteration)
    if mt.release() >= (0, 14):
        save_as_before_0_14(optimizer)
    mt.save(FORMAT, model, optimizer, checkpoint)
    new, of_new = mt.build(make_model=biases_last)
    mt.load(FORMAT, new, of_new, checkpoint)
    found = steps(of_new)
    return "" if found == steps(optimizer) else f"the groups go on at the steps {found}, not at 2, and no error"


def biases_last(config: Any, dtype: torch.dtype, native_fp32: bool) -> Any:
    """A model whose biases are all in the last rank's half of the parameters; the first rank has weights alone."""
    model = mt.tiny_model(config, dtype, native_fp32, out=40)
    model.b = torch.nn.Linear(33, 40, bias=False).to(dtype)
    return model


def steps(optimizer: Any) -> list[Any]:
    """The steps of the groups that have parameters on this rank."""
    return [group.get("step") for group in mt.inner(optimizer).param_groups if group["params"]]


def save_as_before_0_14(optimizer: Any) -> None:
    """Drop the step of empty groups, as earlier releases save it."""
    distributed = mt.inner(optimizer)
    whole = distributed.state_dict

    def state_dict() -> Any:
        found = whole()
        for saved, own in zip(found["optimizer"]["param_groups"], distributed.param_groups, strict=True):
            if not own["params"]:
                del saved["step"]
        return found

    distributed.state_dict = state_dict
