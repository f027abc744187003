"""The record of a training run in a checkpoint of torch.distributed.checkpoint, compared with the files."""

import copy
import json
from collections.abc import Callable
from functools import partial
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
from ckpt_patches.fingerprint import training_state
from ckpt_patches.fingerprint.proof import verdict_of
from ckpt_patches.formats.recorded import KEY
from crafted_files import names

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


CHANGED: dict[str, tuple[Callable[[Model], object], tuple[str, set[str], int]]] = {
    "no states": (lambda state: state["optimizer"]["state"].clear(), (DAMAGED, {"not_as_recorded"}, 1)),
    "weights alone": (lambda state: state.pop("optimizer"), (UNKNOWN, {"not_judged"}, 1)),
    "a number": (lambda state: state.update({KEY: 7}), (UNKNOWN, {"not_judged"}, 1)),
    "not JSON": (lambda state: state.update({KEY: "{"}), (UNKNOWN, {"not_judged"}, 1)),
    "empty": (lambda state: state.update({KEY: ""}), (UNKNOWN, {"not_judged"}, 1)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_lacks_states_or_a_record(name: str, tmp_path: Path) -> None:
    model, optimizer, record = training()
    state: Model = {"model": model, "optimizer": optimizer, KEY: record}
    change, expected = CHANGED[name]
    change(state)
    assert judged(saved(tmp_path, state)) == expected


def test_a_weight_without_states_is_not_as_recorded(tmp_path: Path) -> None:
    model, optimizer, record = training(torch.optim.SGD)
    model["0.weight"][0, 0] += 1
    found = judged(saved(tmp_path, {"model": model, "optimizer": optimizer, KEY: record}))
    assert found == (DAMAGED, {"not_as_recorded"}, 1)


# Steps and buffers


@pytest.mark.parametrize("what", ["step", "1.running_mean", "1.num_batches_tracked"])
@pytest.mark.parametrize("form", [dict, flattened])
def test_a_changed_step_or_buffer_is_not_as_recorded(form: Callable[..., Model], what: str, tmp_path: Path) -> None:
    model, optimizer, record = training()
    same = saved(tmp_path / "same", {"model": model, "optimizer": form(optimizer), KEY: record})
    assert judged(same) == (WHOLE, set(), 0)
    if what == "step":
        for states in optimizer["state"].values():
            states["step"] += 1
    else:
        model[what][...] += 1
    found = saved(tmp_path / "changed", {"model": model, "optimizer": form(optimizer), KEY: record})
    assert judged(found) == (DAMAGED, {"not_as_recorded"}, 1)
    assert main(["compare", str(same), str(same)]) == 0
    assert main(["compare", str(same), str(found)]) == 1


STEPS: dict[str, tuple[torch.Tensor | None, tuple[str, set[str], int]]] = {
    "float64": (torch.tensor(3, dtype=torch.float64), (WHOLE, set(), 0)),
    "int64": (torch.tensor(3), (WHOLE, set(), 0)),
    "bfloat16": (torch.tensor(3, dtype=torch.bfloat16), (WHOLE, set(), 0)),
    "uint8": (torch.tensor(3, dtype=torch.uint8), (WHOLE, set(), 0)),
    "one by one": (torch.tensor([[3.0]]), (WHOLE, set(), 0)),
    "a fraction": (torch.tensor(3.7), (DAMAGED, {"not_as_recorded"}, 1)),
    "no step": (None, (DAMAGED, {"missing_state"}, 0)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_in_another_form(name: str, tmp_path: Path) -> None:
    model, optimizer, record = training()
    step, expected = STEPS[name]
    for states in optimizer["state"].values():
        states.pop("step") if step is None else states.update(step=step.clone())
    assert judged(saved(tmp_path, {"model": model, "optimizer": optimizer, KEY: record})) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_buffer_of_16_bits_may_be_saved_in_32(dtype: torch.dtype, tmp_path: Path) -> None:
    """As FSDP1 does with `MixedPrecision(buffer_dtype=…)`."""
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.randn(5).to(dtype))
    record = fingerprint.of_training(model, optimizer := torch.optim.SGD(model.parameters(), 0.1))
    weights, states = get_state_dict(model, optimizer)
    for number, expected in ((0.0, (WHOLE, set(), 0)), (1.0, (DAMAGED, {"not_as_recorded"}, 1))):
        table = weights["table"].float() + number
        state = {"model": {**weights, "table": table}, "optimizer": states, KEY: record}
        assert judged(saved(tmp_path / str(number), state)) == expected


def test_a_digest_of_a_buffer_that_an_older_release_recorded_is_listed() -> None:
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    record = json.loads(fingerprint.of_training(model, optimizer))
    for name in ("running_mean", "running_var"):
        del record["states"][name]
        record["others"][f"buffer {name}"] = {"value": "0"}
    found = verdict_of(training_state.live(model, optimizer), record)
    assert not found.is_wrong
    names = ("running_mean", "running_var")
    assert found.not_verified.keys() == {f"buffer {name}" for name in names} | {f"{name} buffer" for name in names}


@pytest.mark.parametrize("places", [("model", "ema.module"), ("net", "ema")])
def test_the_record_tells_a_model_from_its_average(places: tuple[str, str], tmp_path: Path) -> None:
    model, optimizer, record = training()
    average = {name: tensor * 0.5 for name, tensor in model.items()}
    of_average: Model = average if "." not in places[1] else {"module": average}
    state = {places[0]: model, places[1].split(".")[0]: of_average, "optimizer": optimizer, KEY: record}
    verdict, found, status = judged(saved(tmp_path / "as saved", state))
    assert (found, status) == (set() if places[0] == "model" else {"not_judged"}, 0)
    assert verdict == (UNKNOWN if found else WHOLE)
    model["2.bias"] += 1
    assert judged(saved(tmp_path / "changed", state))[2] == 1


@pytest.mark.parametrize("places", [("net", "ema"), ("model", "state_dict")])
def test_a_copy_does_not_stand_for_a_damaged_model(places: tuple[str, str], tmp_path: Path) -> None:
    model, optimizer, record = training()
    state: Model = {places[0]: model, places[1]: copy.deepcopy(model), "optimizer": optimizer, KEY: record}
    assert judged(saved(tmp_path / "as saved", state))[2] == 0
    model["2.bias"] += 1
    assert judged(saved(tmp_path / "changed", state))[2] == 1


@pytest.mark.parametrize("name", ["ema", "ema_model", "swa"])
def test_a_model_beside_a_nested_average_is_not_mistaken(name: str, tmp_path: Path) -> None:
    model, optimizer, record = training()
    average = {key: tensor + 0.5 for key, tensor in model.items()}
    state: Model = {"unet": model, name: {"module": average}, "optimizer": optimizer}
    model["0.weight"][:3] = 0
    assert audit(saved(tmp_path / "damaged", state)).verdict != WHOLE
    found = judged(saved(tmp_path / "recorded", {**state, "unet": training()[0], KEY: record}))
    assert found == (UNKNOWN, {"not_judged"}, 0)


@pytest.mark.parametrize("place", ["model", "optimizer", "both"])
def test_a_record_may_be_in_the_models_or_the_optimizers_state(place: str, tmp_path: Path) -> None:
    model, optimizer, record = training()
    state: Model = {"model": model, "optimizer": optimizer}
    for name in ("model", "optimizer") if place == "both" else (place,):
        state[name] = {**state[name], KEY: record}
    assert judged(saved(tmp_path / "as saved", state)) == (WHOLE, set(), 0)
    optimizer["state"]["0.weight"]["exp_avg"] += 1
    assert judged(saved(tmp_path / "changed", state)) == (DAMAGED, {"not_as_recorded"}, 1)


@pytest.mark.parametrize("places", ["top", "models", "optimizers"])
def test_two_models_stored_by_kind_are_never_damaged_for_it(places: str, tmp_path: Path) -> None:
    state: Model = {"model": {}, "optimizer": {}}
    for name, seed in (("G", 1), ("D", 2)):
        model, optimizer, record = training(seed=seed)
        of_model, of_optimizer = (places == "models"), (places == "optimizers")
        state["model"][name] = {**model, **({KEY: record} if of_model else {})}
        state["optimizer"][name] = {**optimizer, **({KEY: record} if of_optimizer else {})}
        state |= {KEY: record} if places == "top" else {}
    verdict, found, status = judged(saved(tmp_path, state))
    assert "not_as_recorded" not in found
    assert (verdict, status) == (UNKNOWN, 1)


def test_one_model_has_two_optimizers_in_folders_of_their_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [torch.optim.AdamW(part.parameters()) for part in model]
    model(torch.randn(8, 4)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    record = fingerprint.of_training(model, optimizers)
    saved(tmp_path / "pytorch_model_fsdp_0", {"model": model.state_dict(), KEY: record})
    for number, part in enumerate(model):
        _, states = get_state_dict(part, optimizers[number])
        its = {f"{number}.{name}": value for name, value in states["state"].items()}
        params = [f"{number}.{name}" for name in states["param_groups"][0]["params"]]
        groups = [{**states["param_groups"][0], "params": params}]
        saved(tmp_path / f"optimizer_{number}", {"optimizer": {"state": its, "param_groups": groups}})
    assert judged(tmp_path) == (WHOLE, set(), 0)


# Records from elsewhere

HOSTILE: dict[str, Callable[[Model], object]] = {
    "settings by number": lambda record: record.update(settings={"a": [[1, 2]]}),
    "infinitely many elements": lambda record: record["states"]["0.weight"]["master"].__setitem__(0, float("inf")),
    "no states": lambda record: record.update(states={}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_record_that_proves_nothing_is_not_judged(name: str, tmp_path: Path) -> None:
    model, optimizer, text = training()
    record = json.loads(text)
    HOSTILE[name](record)
    found = judged(saved(tmp_path, {"model": model, "optimizer": optimizer, KEY: json.dumps(record)}))
    assert found == (UNKNOWN, {"not_judged"}, 1)


def test_a_record_of_many_names_is_shown_in_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, text = training()
    record = json.dumps({**json.loads(text), "left_out": {f"state {number}": "why" for number in range(20_000)}})
    main(["fingerprint", str(saved(tmp_path, {"model": model, "optimizer": optimizer, KEY: record}))])
    said = capsys.readouterr().out
    assert said.count("\n") < 1100
    assert "and 19,000 more (--json)" in said


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
    assert main(["compare", str(one), str(same)]) == 0
    assert main(["compare", str(one), str(other)]) == 1


@pytest.mark.parametrize("change", ["", "second"])
def test_several_records_are_compared_by_a_load_alone(change: str, tmp_path: Path) -> None:
    assert judged(saved(tmp_path, nested(change, with_records=True))) == (UNKNOWN, {"not_judged"}, 1)


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


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_record_of_one_of_two_models_is_not_compared_with_the_other(kind: Any, tmp_path: Path) -> None:
    """Which of two optimizers a record at the top is of cannot be known if they have the same names."""
    first, second = training(kind), training(partial(kind, weight_decay=0.3), seed=2)
    flat = {"model": first[0], "optimizer": first[1], "other": second[0], "optimizer_other": second[1], KEY: first[2]}
    assert "not_as_recorded" not in judged(saved(tmp_path / "flat", flat))[1]
    state = {"g": {"model": first[0], "optimizer": first[1]}, "d": {"model": second[0], "optimizer": second[1]}}
    verdict, found, _ = judged(saved(tmp_path / "nested", {**state, KEY: first[2]}))
    assert (verdict, found) == (UNKNOWN, {"not_judged"})
