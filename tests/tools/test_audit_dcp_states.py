"""States of other optimizers than Adam, and states without weights, in torch.distributed.checkpoint."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckpt_patches.audit.audit import DAMAGED, UNKNOWN, WHOLE, audit
from crafted_files import found_in, names
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
    assert found_in(saved(tmp_path / "as saved", {"model": model, "optimizer": optimizer}))[0] == WHOLE
    own = optimizer["state"]["0.weight"]
    shape = own[state].shape
    longest = shape.index(max(shape))
    own[state] = own[state].narrow(longest, 0, shape[longest] - 1).clone()
    assert found_in(saved(tmp_path / "cut", {"model": model, "optimizer": optimizer})) == (DAMAGED, {"contradiction"})


def test_lists_of_states_are_no_parameters(tmp_path: Path) -> None:
    """LBFGS keeps its history with the first parameter, so the others seem to have no state."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters())
    inputs = torch.randn(8, 4)
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.step(lambda: loss_of(model, inputs))
    assert found_in(saved(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})) == (
        WHOLE,
        set(),
    )


def loss_of(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs).square().sum()
    loss.backward()
    return loss


def test_raw_states_beside_random_states_alone_have_no_weights_to_compare_with(tmp_path: Path) -> None:
    optimizer = training()[1]
    numbered = dict(enumerate(optimizer["state"].values()))
    groups = [{**optimizer["param_groups"][0], "params": list(numbered)}]
    state = {"optimizer": {"state": numbered, "param_groups": groups}, "rng": torch.get_rng_state()}
    assert found_in(saved(tmp_path, state))[0] == WHOLE


def test_a_scalar_has_another_state_than_a_matrix_in_adafactor(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model.scale = torch.nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.Adafactor(model.parameters())
    (model(torch.randn(4, 3)) * model.scale).square().sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    assert found_in(saved(tmp_path / "as saved", {"model": weights, "optimizer": states}))[0] == WHOLE
    states["state"]["0.weight"].pop("col_var")
    assert found_in(saved(tmp_path / "lost", {"model": weights, "optimizer": states}))[0] == DAMAGED


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("kind", "state"), [(torch.optim.SGD, "momentum_buffer"), (torch.optim.Adagrad, "sum")])
def test_infinity_in_a_state_is_no_mask(kind: Any, state: str, sign: int, tmp_path: Path) -> None:
    model, optimizer, _ = training(partial(kind, momentum=0.9) if kind is torch.optim.SGD else kind)
    optimizer["state"]["0.weight"][state][:3] = sign * torch.inf
    assert found_in(saved(tmp_path, {"model": model, "optimizer": optimizer})) == (DAMAGED, {"not_finite"})


def test_one_number_that_is_infinite_may_be_a_best_loss(tmp_path: Path) -> None:
    """Where no optimizer's states tell which tensors are trained."""
    model, _, _ = training(torch.optim.SGD)
    assert found_in(saved(tmp_path, {"model": model, "best": torch.tensor(torch.inf)})) == (WHOLE, set())


def test_a_frozen_parameter_of_a_flattened_optimizer_is_no_group(tmp_path: Path) -> None:
    model, optimizer, _ = training()
    states = flattened(optimizer)
    kept = {name: value for name, value in states.items() if not name.startswith("state.0.weight.")}
    assert found_in(saved(tmp_path, {"model": model, "optimizer": kept})) == (WHOLE, set())


def test_states_without_any_weight_are_unusual(tmp_path: Path) -> None:
    assert found_in(saved(tmp_path, {"optimizer": training()[1]})) == (UNKNOWN, {"unusual"})


@pytest.mark.parametrize(("folder", "verdict"), [("step-1000", UNKNOWN), ("step-1", WHOLE), ("saved", WHOLE)])
def test_param_groups_without_states_have_taken_no_step(folder: str, verdict: str, tmp_path: Path) -> None:
    model, optimizer, _ = training()
    report = audit(saved(tmp_path / folder, {"model": model, "optimizer": {**optimizer, "state": {}}}))
    assert report.verdict == verdict, report.findings


class Coded(torch.Tensor):
    """A tensor of codes of 8 bits with one scale, as torchao's states are."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> "Coded":
        made: Coded = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.is_pinned.default:
            return False
        return Coded(args[0].codes, args[0].scale)  # detach, clone and the like


def coded(scale: list[float]) -> dict[str, Any]:
    """A state dict of Adam whose moments are such tensors."""
    model, optimizer, _ = training()
    for state in optimizer["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = Coded(torch.ones(state[name].shape, dtype=torch.uint8), torch.tensor(scale))
    return {"model": model, "optimizer": optimizer}


def nested(scale: list[float]) -> dict[str, Any]:
    """The same, with dicts in place of the moments, as bitsandbytes has them."""
    state = coded(scale)
    for own in state["optimizer"]["state"].values():
        moments = [own.pop(name) for name in ("exp_avg", "exp_avg_sq")]
        parts = {f"state{n}": moment.codes for n, moment in enumerate(moments, 1)}
        own["quantized"] = parts | {f"absmax{n}": moment.scale for n, moment in enumerate(moments, 1)}
    for group in state["optimizer"]["param_groups"]:
        for key in ("amsgrad", "capturable"):
            group.pop(key)
    return state


@pytest.mark.parametrize("states", [coded, nested])
@pytest.mark.parametrize(
    ("scale", "verdict", "found"),
    [([1.0, 0.5], WHOLE, set()), ([0.0, 0.0], UNKNOWN, {"unusual"}), ([1.0, torch.nan], DAMAGED, {"not_finite"})],
)
def test_states_of_codes_and_scales(states: Any, scale: Any, verdict: str, found: set[str], tmp_path: Path) -> None:
    assert found_in(saved(tmp_path, states(scale))) == (verdict, found)
    assert ("coded_state" in names(audit(tmp_path), notes=True)) == (states is coded)


@pytest.mark.parametrize(
    ("settings", "verdict"), [({}, DAMAGED), ({"fixed_decay": False}, WHOLE)], ids=["Adam", "ADOPT"]
)
def test_rows_of_a_first_moment_alone(settings: dict[str, Any], verdict: str, tmp_path: Path) -> None:
    """ADOPT's begins a step later than its square: a token of the first step alone has none."""
    model, optimizer, _ = training()
    optimizer["state"]["0.weight"]["exp_avg"][2] = 0
    if settings:
        optimizer["param_groups"] = [
            {**settings, **{key: group[key] for key in ("lr", "betas", "params")}}
            for group in optimizer["param_groups"]
        ]
    assert found_in(saved(tmp_path, {"model": model, "optimizer": optimizer}))[0] == verdict
