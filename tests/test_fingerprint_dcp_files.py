"""The record of a training run in a checkpoint of torch.distributed.checkpoint, compared with the files."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckpt_patches import fingerprint
from ckpt_patches.audit.audit import DAMAGED, UNKNOWN, WHOLE, audit
from ckpt_patches.cli import main
from ckpt_patches.fingerprint.record import KEY
from test_audit_dcp import names

Model = dict[str, Any]


def training(kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, seed: int = 1) -> tuple[Model, Model, str]:
    """The model's and the optimizer's state dicts after three steps, and their record."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    optimizer = kind(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = copy.deepcopy(get_state_dict(model, optimizer))
    return dict(states[0]), dict(states[1]), fingerprint.of_training(model, optimizer)


def saved(path: Path, state: Model) -> Path:
    checkpoint.save(state, checkpoint_id=path)
    return path


def flattened(optimizer: Model) -> Model:
    """The form of `flatten_optimizer_state_dict=True`: each parameter has its own settings."""
    states = {f"state.{name}.{key}": value for name, own in optimizer["state"].items() for key, value in own.items()}
    settings = {
        f"param_groups.{name}.{key}": value
        for group in optimizer["param_groups"]
        for name in group["params"]
        for key, value in group.items()
        if key != "params"
    }
    return {**states, **settings}


def judged(path: Path) -> tuple[str, set[str], int]:
    """The verdict, the findings' kinds, and the exit status of `fingerprint`."""
    report = audit(path)
    return report.verdict, names(report), main(["fingerprint", str(path)])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_all_states_are_as_recorded(kind: Callable[..., torch.optim.Optimizer], tmp_path: Path) -> None:
    model, optimizer, record = training(kind)
    assert judged(saved(tmp_path, {"model": model, "optimizer": optimizer, KEY: record})) == (WHOLE, set(), 0)


def test_all_recorded_states_are_gone(tmp_path: Path) -> None:
    model, optimizer, record = training()
    optimizer["state"].clear()
    found = judged(saved(tmp_path, {"model": model, "optimizer": optimizer, KEY: record}))
    assert found == (DAMAGED, {"not_as_recorded"}, 1)


def test_a_weight_without_states_is_not_as_recorded(tmp_path: Path) -> None:
    model, optimizer, record = training(torch.optim.SGD)
    model["0.weight"][0, 0] += 1
    found = judged(saved(tmp_path, {"model": model, "optimizer": optimizer, KEY: record}))
    assert found == (DAMAGED, {"not_as_recorded"}, 1)


def test_a_record_beside_weights_alone_is_not_judged(tmp_path: Path) -> None:
    model, _, record = training()
    assert judged(saved(tmp_path, {"model": model, KEY: record})) == (UNKNOWN, {"not_judged"}, 1)


@pytest.mark.parametrize("record", [7, "{", ""], ids=["a number", "not JSON", "empty"])
def test_an_unreadable_record_is_not_judged(record: Any, tmp_path: Path) -> None:
    model, optimizer, _ = training()
    found = judged(saved(tmp_path, {"model": model, "optimizer": optimizer, KEY: record}))
    assert found[0] == UNKNOWN
    assert found[1:] == ({"not_judged"}, 1)


# Settings and buffers


def changed(what: str, model: Model, optimizer: Model) -> None:
    if what == "step":
        for states in optimizer["state"].values():
            states["step"] += 1
    elif what == "weight_decay":
        optimizer["param_groups"][0]["weight_decay"] = 0.5
    elif what == "betas":
        optimizer["param_groups"][0]["betas"] = (0.9, 0.99)
    else:
        model[what][...] += 1


@pytest.mark.parametrize("what", ["step", "weight_decay", "betas", "1.running_mean", "1.num_batches_tracked"])
@pytest.mark.parametrize("form", [dict, flattened])
def test_a_changed_setting_or_buffer_is_not_as_recorded(form: Callable[..., Model], what: str, tmp_path: Path) -> None:
    model, optimizer, record = training()
    same = saved(tmp_path / "same", {"model": model, "optimizer": form(optimizer), KEY: record})
    assert judged(same) == (WHOLE, set(), 0)
    changed(what, model, optimizer)
    found = saved(tmp_path / "changed", {"model": model, "optimizer": form(optimizer), KEY: record})
    assert judged(found) == (DAMAGED, {"not_as_recorded"}, 1)
    is_buffer = what.startswith("1.")
    assert main(["fingerprint", str(found), "--against", str(same)]) == (0 if what == "1.num_batches_tracked" else 1)
    (finding,) = (one for one in audit(found).findings if one.kind.name == "not_as_recorded")
    assert finding.detail.startswith("buffer" if is_buffer else what)
    assert is_buffer or finding.detail.endswith("in the run (6 parameters)")


class Counting(torch.optim.AdamW):
    """With a number among the states of each parameter."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for states in self.state.values():
            states["count"] = states.get("count", 0) + 1
        return found


@pytest.mark.parametrize("form", [dict, flattened])
def test_a_number_among_states_is_compared(form: Callable[..., Model], tmp_path: Path) -> None:
    model, optimizer, record = training(Counting)
    same = saved(tmp_path / "same", {"model": model, "optimizer": form(optimizer), KEY: record})
    assert judged(same) == (WHOLE, set(), 0)
    optimizer["state"]["2.bias"]["count"] += 1
    found = saved(tmp_path / "changed", {"model": model, "optimizer": form(optimizer), KEY: record})
    assert judged(found) == (DAMAGED, {"not_as_recorded"}, 1)


def test_settings_that_are_not_in_the_files_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, record = training()
    optimizer["param_groups"][0].pop("eps")
    del model["1.running_var"]
    assert main(["fingerprint", str(saved(tmp_path, {"model": model, "optimizer": optimizer, KEY: record}))]) == 0
    said = capsys.readouterr().out
    assert "eps of 6 parameters  not compared: not in the files" in said
    assert "buffer 1.running_var  not compared: not in the files" in said


def test_a_recorded_setting_nested_without_end_is_no_number(tmp_path: Path) -> None:
    model, optimizer, record = training()
    record = record.replace('"betas": [0.9, 0.999]', f'"betas": {"[" * 900}{"]" * 900}')
    found = judged(saved(tmp_path, {"model": model, "optimizer": optimizer, KEY: record}))
    assert found == (DAMAGED, {"not_as_recorded"}, 1)


def test_a_huge_number_is_shown_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, record = training()
    optimizer["param_groups"][0]["weight_decay"] = 10**4000
    record = record.replace('"eps": 1e-08', f'"eps": {"9" * 4000}')
    folder = saved(tmp_path, {"model": model, "optimizer": optimizer, KEY: record})
    assert main(["fingerprint", str(folder)]) == 1
    assert max(map(len, capsys.readouterr().out.splitlines())) < 500
    assert audit(folder).verdict == DAMAGED


# Two models with equal parameter names, such as a generator and a discriminator


def nested(change: str = "", *, with_records: bool = False) -> Model:
    """A state dict of two models; `change` names one of which a moment is changed."""
    found: Model = {}
    for number, name in enumerate(("first", "second")):
        model, optimizer, record = training(seed=number)
        if name == change:
            optimizer["state"]["0.weight"]["exp_avg"][0, 0] += 1
        found[name] = {"model": model, "optimizer": optimizer, **({KEY: record} if with_records else {})}
    return found


def flat(change: str = "") -> Model:
    return {f"{kind}_{name}": value for name, own in nested(change).items() for kind, value in own.items()}


@pytest.mark.parametrize("form", [nested, flat])
@pytest.mark.parametrize("change", ["first", "second"])
def test_each_of_two_optimizers_is_compared(form: Callable[..., Model], change: str, tmp_path: Path) -> None:
    one, same, other = (saved(tmp_path / str(n), form(own)) for n, own in enumerate(("", "", change)))
    assert main(["fingerprint", str(one), "--against", str(same)]) == 0
    assert main(["fingerprint", str(one), "--against", str(other)]) == 1


@pytest.mark.parametrize("change", ["first", "second"])
def test_each_of_two_records_is_compared(change: str, tmp_path: Path) -> None:
    assert judged(saved(tmp_path / "as saved", nested(with_records=True))) == (WHOLE, set(), 0)
    changed = saved(tmp_path / "changed", nested(change, with_records=True))
    assert judged(changed) == (DAMAGED, {"not_as_recorded"}, 1)


def test_one_record_of_two_models_that_were_saved_apart_is_not_judged(tmp_path: Path) -> None:
    """It names `first.weight` what is `weight` in each of the files' optimizers."""
    both = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("first", "second")})
    optimizers = {name: torch.optim.AdamW(model.parameters(), 0.01) for name, model in both.items()}
    state: Model = {}
    for name, model in both.items():
        model(torch.randn(4, 6)).sum().backward()
        optimizers[name].step()
        weights, states = get_state_dict(model, optimizers[name])
        state[name] = {"model": weights, "optimizer": states}
    record = fingerprint.of_training(both, list(optimizers.values()))
    assert judged(saved(tmp_path, {**state, KEY: record})) == (UNKNOWN, {"not_judged"}, 1)
