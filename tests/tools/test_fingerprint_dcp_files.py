"""The record of a training run in a checkpoint of torch.distributed.checkpoint, compared with the files."""

import copy
import json
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


Change = Callable[[Model], object]
Judged = tuple[str, set[str], int]
SOUND: Judged = (WHOLE, set(), 0)
OTHER: Judged = (DAMAGED, {"not_as_recorded"}, 1)
UNSURE: Judged = (UNKNOWN, {"not_judged"}, 1)


def record_with(**changes: Any) -> Change:
    return lambda state: state.update({KEY: json.dumps({**json.loads(state[KEY]), **changes})})


def step(value: torch.Tensor | None) -> Change:
    """Another step, or none."""

    def changed(state: Model) -> None:
        for its in state["optimizer"]["state"].values():
            its.pop("step") if value is None else its.update(step=value.clone())

    return changed


def added(*path: str) -> Change:
    """One is added to a tensor."""

    def changed(state: Model) -> None:
        tensor: Any = state
        for name in path:
            tensor = tensor[name]
        tensor += 1

    return changed


# What is changed in the state of a run that is saved with its record
CHANGED: dict[str, tuple[Change, Judged]] = {
    "nothing": (lambda state: None, SOUND),
    "a moment": (added("optimizer", "state", "0.weight", "exp_avg"), OTHER),
    "a buffer": (added("model", "1.running_mean"), OTHER),
    "a buffer of a number": (added("model", "1.num_batches_tracked"), OTHER),
    "no states": (lambda state: state["optimizer"]["state"].clear(), OTHER),
    "weights alone": (lambda state: state.pop("optimizer"), UNSURE),
    "a step in int64": (step(torch.tensor(3)), SOUND),
    "a step in bfloat16": (step(torch.tensor(3, dtype=torch.bfloat16)), SOUND),
    "a step in a matrix of bytes": (step(torch.tensor([[3]], dtype=torch.uint8)), SOUND),
    "a step of a fraction": (step(torch.tensor(3.7)), OTHER),
    "another step": (step(torch.tensor(4.0)), OTHER),
    "no step": (step(None), (DAMAGED, {"missing_state"}, 0)),
    "a record that is a number": (lambda state: state.update({KEY: 7}), UNSURE),
    "a record that is not JSON": (lambda state: state.update({KEY: "{"}), UNSURE),
    "a record of other settings": (record_with(settings={"a": [[1, 2]]}), UNSURE),
    "a record of infinite sizes": (record_with(states={"0.weight": {"master": [float("inf"), 0, "", {}]}}), UNSURE),
    "a record of no states": (record_with(states={}), UNSURE),
}


@pytest.mark.parametrize("name", CHANGED)
def test_the_files_are_compared_with_the_record(name: str, tmp_path: Path) -> None:
    model, optimizer, record = training()
    state: Model = {"model": model, "optimizer": optimizer, KEY: record}
    change, expected = CHANGED[name]
    change(state)
    assert judged(saved(tmp_path, state)) == expected


@pytest.mark.parametrize("place", ["model", "optimizer", "both"])
@pytest.mark.parametrize("form", [dict, flattened])
def test_a_record_may_be_in_the_models_or_the_optimizers_state(
    form: Callable[..., Model], place: str, tmp_path: Path
) -> None:
    """Flattened settings of optimizers are compared, too."""
    model, optimizer, record = training()
    for name in ("as saved", "changed"):
        state: Model = {"model": model, "optimizer": form(optimizer)}
        for where in ("model", "optimizer") if place == "both" else (place,):
            state[where] = {**state[where], KEY: record}
        assert judged(saved(tmp_path / name, state)) == (SOUND if name == "as saved" else OTHER)
        optimizer["state"]["0.weight"]["step"] += 1
    assert main(["compare", str(tmp_path / "as saved"), str(tmp_path / "as saved")]) == 0
    assert main(["compare", str(tmp_path / "as saved"), str(tmp_path / "changed")]) == 1


def test_a_weight_without_states_is_not_as_recorded(tmp_path: Path) -> None:
    model, optimizer, record = training(torch.optim.SGD)
    for name in ("as saved", "changed"):
        state = {"model": model, "optimizer": optimizer, KEY: record}
        assert judged(saved(tmp_path / name, state)) == (SOUND if name == "as saved" else OTHER)
        model["0.weight"][0, 0] += 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_buffer_of_16_bits_may_be_saved_in_32(dtype: torch.dtype, tmp_path: Path) -> None:
    """As FSDP1 does with `MixedPrecision(buffer_dtype=…)`."""
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.randn(5).to(dtype))
    record = fingerprint.of_training(model, optimizer := torch.optim.SGD(model.parameters(), 0.1))
    weights, states = get_state_dict(model, optimizer)
    for number, expected in ((0.0, SOUND), (1.0, OTHER)):
        table = weights["table"].float() + number
        state = {"model": {**weights, "table": table}, "optimizer": states, KEY: record}
        assert judged(saved(tmp_path / str(number), state)) == expected


def test_a_digest_of_a_buffer_that_an_older_release_recorded_is_listed() -> None:
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    record = json.loads(fingerprint.of_training(model, optimizer))
    names = ("running_mean", "running_var")
    for name in names:
        del record["states"][name]
        record["others"][f"buffer {name}"] = {"value": "0"}
    found = verdict_of(training_state.live(model, optimizer), record)
    assert not found.is_wrong
    assert found.not_verified.keys() == {f"buffer {name}" for name in names} | {f"{name} buffer" for name in names}


# Several models in one checkpoint


@pytest.mark.parametrize(
    ("places", "factor", "verdict"),
    [
        (("model", "ema.module"), 0.5, WHOLE),
        (("net", "ema"), 0.5, UNKNOWN),
        (("net", "ema"), 1, UNKNOWN),  # a copy
        (("model", "state_dict"), 1, None),
        (("unet", "ema_model.module"), 0.5, UNKNOWN),
        (("unet", "swa.module"), 0.5, UNKNOWN),
    ],
)
def test_an_average_or_a_copy_does_not_stand_for_a_damaged_model(
    places: tuple[str, str], factor: float, verdict: str | None, tmp_path: Path
) -> None:
    model, optimizer, record = training()
    other = {name: tensor * factor if factor != 1 else tensor.clone() for name, tensor in model.items()}
    outer, _, inner = places[1].partition(".")
    state: Model = {places[0]: model, outer: {inner: other} if inner else other, "optimizer": optimizer, KEY: record}
    found, kinds, status = judged(saved(tmp_path / "as saved", state))
    assert (status, "not_as_recorded" in kinds) == (0, False)
    assert verdict in (None, found)
    model["2.bias"] += 1
    assert judged(saved(tmp_path / "changed", state))[2] == 1
    if verdict == UNKNOWN:  # without a record as well
        model["0.weight"][:3] = 0
        del state[KEY]
        assert audit(saved(tmp_path / "damaged", state)).verdict != WHOLE


def several(form: str, records: str = "", change: str = "") -> Model:
    """The state of two models with equal names of parameters, such as a generator and a discriminator.

    Args:
        form: "nested": a model has its optimizer beside it; "by kind": all models are in one dict; "flat".
        records: where they are: "top", "each" for one of each model, "model" or "optimizer".
        change: the model of which a moment is changed.
    """
    found: Model = {"model": {}, "optimizer": {}} if form == "by kind" else {}
    for number, name in enumerate(("first", "second")):
        model, optimizer, record = training(seed=number)
        if name == change:
            optimizer["state"]["0.weight"]["exp_avg"][0, 0] += 1
        own = {"model": model, "optimizer": optimizer}
        for kind, its in own.items():
            its |= {KEY: record} if records == kind else {}
            if form == "by kind":
                found[kind][name] = its
            elif form == "flat":
                found[f"{kind}_{name}"] = its
        if form == "nested":
            found[name] = own | ({KEY: record} if records == "each" else {})
        found |= {KEY: record} if records == "top" else {}
    return found


@pytest.mark.parametrize("form", ["nested", "flat", "by kind"])
@pytest.mark.parametrize("change", ["first", "second"])
def test_each_of_two_optimizers_is_compared(form: str, change: str, tmp_path: Path) -> None:
    one, same, other = (saved(tmp_path / str(n), several(form, "", own)) for n, own in enumerate(("", "", change)))
    assert main(["compare", str(one), str(same)]) == 0
    assert main(["compare", str(one), str(other)]) == 1


@pytest.mark.parametrize(
    ("form", "records", "change"),
    [
        *(("by kind", records, "") for records in ("top", "model", "optimizer")),
        *(("nested", "each", change) for change in ("", "second")),
        *((form, "top", "") for form in ("nested", "flat")),
    ],
)
def test_a_record_of_one_of_two_models_is_not_judged(form: str, records: str, change: str, tmp_path: Path) -> None:
    """Which of the two it is of cannot be known; records of both are compared by a load alone."""
    assert judged(saved(tmp_path, several(form, records, change))) == UNSURE


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
    assert judged(saved(tmp_path, {**state, KEY: record})) == UNSURE


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
    assert judged(tmp_path) == SOUND


def test_a_record_of_many_names_is_shown_in_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, text = training()
    record = json.dumps({**json.loads(text), "left_out": {f"state {number}": "why" for number in range(20_000)}})
    main(["fingerprint", str(saved(tmp_path, {"model": model, "optimizer": optimizer, KEY: record}))])
    said = capsys.readouterr().out
    assert said.count("\n") < 1100
    assert "and 19,000 more (--json)" in said
