"""States of other optimizers than Adam, and states without weights, in torch.distributed.checkpoint."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, UNKNOWN, WHOLE, audit
from test_audit_dcp import names
from test_fingerprint_dcp_files import saved, training

CENTERED = partial(torch.optim.RMSprop, centered=True)
STATES = [
    (CENTERED, "grad_avg"),
    (torch.optim.Adadelta, "acc_delta"),
    (torch.optim.Rprop, "prev"),
    (torch.optim.Rprop, "step_size"),
    (torch.optim.Adafactor, "row_var"),
    (torch.optim.Adafactor, "col_var"),
    (torch.optim.ASGD, "ax"),
]


@pytest.mark.parametrize(("kind", "state"), STATES, ids=[state for _, state in STATES])
def test_a_state_of_another_shape_is_damage(kind: Any, state: str, tmp_path: Path) -> None:
    model, optimizer, _ = training(kind)
    assert audit(saved(tmp_path / "as saved", {"model": model, "optimizer": optimizer})).verdict == WHOLE
    own = optimizer["state"]["0.weight"]
    own[state] = torch.cat([own[state], own[state]])
    report = audit(saved(tmp_path / "longer", {"model": model, "optimizer": optimizer}))
    assert (report.verdict, names(report)) == (DAMAGED, {"contradiction"})


def test_lists_of_states_are_no_parameters(tmp_path: Path) -> None:
    """LBFGS keeps its history with the first parameter, so the others seem to have no state."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters())
    inputs = torch.randn(8, 4)
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.step(lambda: loss_of(model, inputs))
    report = audit(saved(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    assert (report.verdict, names(report)) == (UNKNOWN, {"unusual"})


def loss_of(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs).square().sum()
    loss.backward()
    return loss


def test_states_without_any_weight_are_unusual(tmp_path: Path) -> None:
    report = audit(saved(tmp_path, {"optimizer": training()[1]}))
    assert (report.verdict, names(report)) == (UNKNOWN, {"unusual"})


@pytest.mark.parametrize(("folder", "verdict"), [("step-1000", UNKNOWN), ("step-1", WHOLE), ("saved", WHOLE)])
def test_param_groups_without_states_have_taken_no_step(folder: str, verdict: str, tmp_path: Path) -> None:
    model, optimizer, _ = training()
    report = audit(saved(tmp_path / folder, {"model": model, "optimizer": {**optimizer, "state": {}}}))
    assert report.verdict == verdict, report.findings
