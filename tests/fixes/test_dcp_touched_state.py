"""dcp_touched_state: the states of an optimizer that has looked at them before its first step are restored."""

from pathlib import Path
from typing import Any

import pytest

from upstream import affected, called, outcomes

# The names of the states that a resume has restored as they were saved, of those that the saved run had.
test_no_state_is_restored_and_there_is_no_error, test_each_state_is_restored = outcomes(
    __file__, "resume", [], ["bias.exp_avg", "bias.step", "weight.exp_avg", "weight.step"]
)


@pytest.mark.parametrize("delivery", ["none", "hook"])
@pytest.mark.parametrize("version", affected("dcp_touched_state"))
def test_a_save_before_the_first_step_counts_no_step_in_the_settings(version: str, delivery: str) -> None:
    assert called(__file__, "counted", version=version, delivery=delivery) == 0


# What the process runs


def start() -> tuple[Any, Any]:
    """A model, and an optimizer that is ready to train."""
    import torch

    class Touching(torch.optim.Optimizer):
        """Looks at the state of each parameter in `train()`, as schedule-free optimizers do."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1, "k": 0})

        def train(self) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if "exp_avg" in self.state[parameter]:
                        parameter.data.lerp_(self.state[parameter]["exp_avg"], 0.5)

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["k"] += 1
                for parameter in group["params"]:
                    state = self.state[parameter]
                    if not state:
                        state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(parameter))
                    state["step"] += 1
                    state["exp_avg"].lerp_(parameter.grad, 0.5)
                    parameter.data.add_(state["exp_avg"], alpha=-group["lr"])

    model = torch.nn.Linear(8, 4)
    optimizer = Touching(model.parameters())
    optimizer.train()
    return model, optimizer


def counted(folder: Path) -> int:
    """The steps that the optimizer has counted in its settings after a state dict of a new run."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = start()
    get_state_dict(model, optimizer)
    return int(optimizer.param_groups[0]["k"])


def resume(folder: Path) -> list[str]:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def states(model: Any, optimizer: Any) -> dict[str, Any]:
        names = {parameter: name for name, parameter in model.named_parameters()}
        return {f"{names[p]}.{key}": value for p, state in optimizer.state.items() for key, value in state.items()}

    model, optimizer = start()
    for _ in range(2):
        model(torch.ones(2, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
    saved = states(model, optimizer)
    model, optimizer = start()
    loaded = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    now = states(model, optimizer)
    return sorted(name for name, value in saved.items() if name in now and torch.equal(value, now[name]))
