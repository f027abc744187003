"""States of other optimizers than Adam, and states without weights, in torch.distributed.checkpoint."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckpt_patches.audit.audit import DAMAGED, UNKNOWN, WHOLE, audit
from test_audit_dcp import names
from test_fingerprint_dcp_files import flattened, saved, training

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
    shape = own[state].shape
    longest = shape.index(max(shape))
    own[state] = own[state].narrow(longest, 0, shape[longest] - 1).clone()
    report = audit(saved(tmp_path / "cut", {"model": model, "optimizer": optimizer}))
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
    assert (report.verdict, names(report)) == (WHOLE, set())


def loss_of(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs).square().sum()
    loss.backward()
    return loss


def test_raw_states_beside_random_states_alone_have_no_weights_to_compare_with(tmp_path: Path) -> None:
    optimizer = training()[1]
    numbered = dict(enumerate(optimizer["state"].values()))
    groups = [{**optimizer["param_groups"][0], "params": list(numbered)}]
    state = {"optimizer": {"state": numbered, "param_groups": groups}, "rng": torch.get_rng_state()}
    assert audit(saved(tmp_path, state)).verdict == WHOLE


def test_a_scalar_has_another_state_than_a_matrix_in_adafactor(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model.scale = torch.nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.Adafactor(model.parameters())
    (model(torch.randn(4, 3)) * model.scale).square().sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    assert audit(saved(tmp_path / "as saved", {"model": weights, "optimizer": states})).verdict == WHOLE
    states["state"]["0.weight"].pop("col_var")
    assert audit(saved(tmp_path / "lost", {"model": weights, "optimizer": states})).verdict == DAMAGED


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("kind", "state"), [(torch.optim.SGD, "momentum_buffer"), (torch.optim.Adagrad, "sum")])
def test_infinity_in_a_state_is_no_mask(kind: Any, state: str, sign: int, tmp_path: Path) -> None:
    model, optimizer, _ = training(partial(kind, momentum=0.9) if kind is torch.optim.SGD else kind)
    optimizer["state"]["0.weight"][state][:3] = sign * torch.inf
    report = audit(saved(tmp_path, {"model": model, "optimizer": optimizer}))
    assert (report.verdict, names(report)) == (DAMAGED, {"not_finite"})


def test_one_number_that_is_infinite_may_be_a_best_loss(tmp_path: Path) -> None:
    """Where no optimizer's states tell which tensors are trained."""
    model, _, _ = training(torch.optim.SGD)
    report = audit(saved(tmp_path, {"model": model, "best": torch.tensor(torch.inf)}))
    assert (report.verdict, names(report)) == (WHOLE, set())


def test_a_frozen_parameter_of_a_flattened_optimizer_is_no_group(tmp_path: Path) -> None:
    model, optimizer, _ = training()
    states = flattened(optimizer)
    kept = {name: value for name, value in states.items() if not name.startswith("state.0.weight.")}
    report = audit(saved(tmp_path, {"model": model, "optimizer": kept}))
    assert (report.verdict, names(report)) == (WHOLE, set())


def test_states_without_any_weight_are_unusual(tmp_path: Path) -> None:
    report = audit(saved(tmp_path, {"optimizer": training()[1]}))
    assert (report.verdict, names(report)) == (UNKNOWN, {"unusual"})


@pytest.mark.parametrize(("folder", "verdict"), [("step-1000", UNKNOWN), ("step-1", WHOLE), ("saved", WHOLE)])
def test_param_groups_without_states_have_taken_no_step(folder: str, verdict: str, tmp_path: Path) -> None:
    model, optimizer, _ = training()
    report = audit(saved(tmp_path / folder, {"model": model, "optimizer": {**optimizer, "state": {}}}))
    assert report.verdict == verdict, report.findings
