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
