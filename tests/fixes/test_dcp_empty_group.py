"""dcp_empty_group: the settings of a param group without parameters are loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from upstream import affected, called, outcomes

SETTINGS = ["betas", "eps", "lr", "weight_decay"]
# Of the group without parameters, the settings that are as they were saved; and the error of the next step.
test_the_settings_are_gone_and_the_next_step_dies, test_the_settings_are_those_that_were_saved = outcomes(
    __file__, "resume", [[], "KeyError: 'betas'"], [SETTINGS, ""]
)


@pytest.mark.parametrize("delivery", ["none", "hook"])
@pytest.mark.parametrize("version", affected("dcp_empty_group"))
def test_an_empty_group_at_the_end_is_loaded_as_before(version: str, delivery: str) -> None:
    at_the_end = ("weight", "bias", "")
    assert called(__file__, "resume", at_the_end, version=version, delivery=delivery) == [SETTINGS, ""]


# What the process runs


def resume(folder: Path, groups: Sequence[str] = ("weight", "", "bias")) -> list[Any]:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def start(decay: float) -> tuple[Any, Any]:
        model = torch.nn.Linear(8, 4)
        parameters = dict(model.named_parameters())
        return model, torch.optim.AdamW(
            [{"params": [parameters[name]] if name else [], "weight_decay": decay} for name in groups], lr=decay
        )

    def step(model: Any, optimizer: Any) -> None:
        model(torch.ones(2, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = start(0.5)
    step(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
    saved = optimizer.param_groups[groups.index("")]
    model, optimizer = start(0.25)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    now = optimizer.param_groups[groups.index("")]
    error = ""
    try:
        step(model, optimizer)
    except KeyError as raised:
        error = f"KeyError: {raised}"
    return [[name for name in SETTINGS if name in now and now[name] == saved[name]], error]
