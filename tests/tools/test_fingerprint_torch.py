"""Fingerprints in training scripts with plain torch: a save on four ranks, and its proof after a load on two."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt_patches import fingerprint
from ckpt_patches.audit.audit import DAMAGED, WHOLE, audit
from ckpt_patches.cli import main
from ckpt_patches.fingerprint import training_state
from ckpt_patches.fingerprint.states import OF_BUFFER
from ckpt_patches.fingerprint.training_state import indices, runs
from upstream import INSTALLED_TORCH, newest, once, run, run_json, tree

FROZEN = {"frozen": True, "tied": True}
# How a run saves and how another one loads; programs/dcp_saving.py defines the meshes.
VERIFIED: dict[str, dict[str, Any]] = {
    "FSDP2 to FSDP2 with tensor parallelism": {"load": {"mesh": "fsdp_tp"}},
    "FSDP2 with tensor parallelism to tensor parallelism": {"save": {"mesh": "fsdp_tp"}, "load": {"mesh": "tp"}},
    "copies of tensor parallelism to FSDP2": {"save": {"mesh": "dp_tp"}},
    "HSDP to DDP": {"save": {"mesh": "hsdp"}, "load": {"mesh": "ddp"}},
    "DDP to FSDP1": {"save": {"mesh": "ddp"}, "load": {"mesh": "fsdp1"}},
    "FSDP1 to FSDP2": {"save": {"mesh": "fsdp1"}},
    "FSDP1 of flat parameters to FSDP1": {"save": {"mesh": "fsdp1_flat"}, "load": {"mesh": "fsdp1"}},
    "FSDP1 to FSDP1 of flat parameters": {"save": {"mesh": "fsdp1"}, "load": {"mesh": "fsdp1_flat"}},
    "a replicated model to a plain one": {"save": {"mesh": "replicate"}, "load": {"mesh": "none"}},
    "bfloat16": {"save": {"dtype": "bfloat16"}, "load": {"mesh": "fsdp_tp", "dtype": "bfloat16"}},
    "frozen and tied parameters": {"save": {"options": FROZEN}, "load": {"mesh": "hsdp", "options": FROZEN}},
    "SGD": {"save": {"optimizer": "SGD"}, "load": {"optimizer": "SGD"}},
    "NAdam": {"save": {"optimizer": "NAdam", "mesh": "ddp"}, "load": {"optimizer": "NAdam", "mesh": "ddp"}},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a template without moments": ({"idiom": "raw"}, "embed.weight exp_avg: the run has no such state"),
    "an element of a weight": ({"idiom": "weight"}, " master: other values"),
    "an element of a moment": ({"load": {"mesh": "ddp"}, "idiom": "moment"}, " exp_avg: other values"),
    "a moment that one of the ranks has not": (
        {"load": {"mesh": "ddp"}, "idiom": "no_moment"},
        "embed.weight exp_avg: 1 of 2 of the parameter's copies have it",
    ),
    "a moment that one of the replicas of HSDP has not": (
        {"load": {"mesh": "hsdp"}, "idiom": "no_moment"},
        "embed.weight exp_avg: 1 of 2 of the parameter's copies have it",
    ),
    "an element of FSDP1": ({"load": {"mesh": "fsdp1"}, "idiom": "weight"}, " master: other values"),
    "a buffer": ({"idiom": "buffer"}, "positions buffer: "),
    "steps": ({"idiom": "step"}, "norm.bias: step 4, saved as 3"),
    "elements lost at the save": (
        {"save": {"damage": ("layers.1.up.weight", "exp_avg", 0, 30, 0)}},
        "layers.1.up.weight exp_avg: other values",
    ),
}
CASES = [*VERIFIED.values(), *(case for case, _ in REFUSED.values()), {"idiom": "no_record"}]


def loaded() -> Path:
    """A folder with all checkpoints, by the number of the case, and each rank's results."""

    def write(folder: Path) -> None:
        folder.mkdir()
        cases = folder / "cases.json"
        cases.write_text(json.dumps([{"save": {}, "load": {}, **case} for case in CASES]))
        found = run_json("dcp_loading", folder, cases, "2", tree=tree("deepspeed", newest("deepspeed")))
        (folder / "said.json").write_text(json.dumps(found))

    return once("dcp_loaded", write)


def said_of(number: int) -> list[str]:
    return [of_rank[number] for of_rank in json.loads((loaded() / "said.json").read_text())]


@pytest.mark.parametrize("name", VERIFIED)
def test_a_right_load_is_verified_in_any_layout(name: str) -> None:
    assert said_of(list(VERIFIED).index(name)) == ["verified", "verified"]


@pytest.mark.parametrize("name", REFUSED)
def test_another_state_is_refused_on_all_ranks(name: str) -> None:
    first, second = said_of(len(VERIFIED) + list(REFUSED).index(name))
    assert first == second
    assert REFUSED[name][1] in first


def test_without_a_record_nothing_is_refused() -> None:
    assert said_of(len(CASES) - 1) == ["verified", "verified"]


def test_files_are_compared_with_the_record() -> None:
    folder = loaded()
    lost = len(VERIFIED) + list(REFUSED).index("elements lost at the save")
    assert (audit(folder / "0").verdict, audit(folder / str(lost)).verdict) == (WHOLE, DAMAGED)
    assert "not_as_recorded" in {finding.kind.name for finding in audit(folder / str(lost)).findings}
    assert main(["fingerprint", str(folder / "0")]) == 0
    assert main(["fingerprint", str(folder / str(lost))]) == 1
    hsdp = list(VERIFIED).index("HSDP to DDP")
    assert main(["compare", str(folder / "0"), str(folder / str(hsdp))]) == 0


@pytest.mark.parametrize(("skipped", "status"), [("", 0), ("dcp_async_copy", 1)])
def test_an_asynchronous_save_writes_what_was_recorded(skipped: str, status: int, tmp_path: Path) -> None:
    """Without the fix, the files have the weights of a later step."""
    on: dict[str, Any] = {"tree": tree("torch", INSTALLED_TORCH), "delivery": "hook"}
    run("dcp_async_record", tmp_path, env={"CKPT_PATCHES_SKIP": skipped}, **on)
    assert main(["fingerprint", str(tmp_path)]) == status


# One process


def trained_by(make: Callable[[nn.Sequential], Any]) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizers = make(model)

    def loss() -> torch.Tensor:
        model.zero_grad()
        found: torch.Tensor = model(torch.ones(2, 4)).square().mean()
        found.backward()
        return found

    for optimizer in 3 * (optimizers if isinstance(optimizers, list) else [optimizers]):
        optimizer.step(loss)
    return model, optimizers


def decay(model: nn.Sequential, optimizer: Any) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.5


# How a model is trained, how its state is changed, and what is said
CHANGED: dict[str, tuple[Callable[[nn.Sequential], Any], Callable[[nn.Sequential, Any], object], str]] = {
    "several optimizers": (
        lambda model: [torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[1].parameters(), 0.1)],
        lambda model, _: model[1].bias.data.add_(1),
        r"1\.bias master: other values",
    ),
    "a group without parameters": (  # torch.distributed.checkpoint loses its settings: pytorch#143828
        lambda model: torch.optim.AdamW([{"params": model.parameters()}, {"params": [], "weight_decay": 0.3}]),
        lambda _, optimizer: optimizer.param_groups[1].pop("betas"),
        r"param group 1: betas None, saved as \[0\.9, 0\.999\]",
    ),
    "eps of None": (lambda model: torch.optim.Adafactor(model.parameters()), decay, "weight_decay"),
    "betas that are tensors": (
        lambda model: torch.optim.Adam(
            model.parameters(), lr=torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
        ),
        decay,
        "weight_decay",
    ),
    "numbers and lists among states": (
        lambda model: torch.optim.LBFGS(model.parameters()),
        lambda _, optimizer: next(iter(optimizer.state.values())).update(n_iter=0),
        "state n_iter 0, saved as (.|\n)*old_dirs: a state of type list",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_any_optimizer_keeps_is_compared(name: str) -> None:
    make, change, said = CHANGED[name]
    model, optimizers = trained_by(make)
    record = fingerprint.of_training(model, optimizers)
    fingerprint.prove(model, optimizers, record)
    change(model, optimizers)
    with pytest.raises(fingerprint.FingerprintError, match=said):
        fingerprint.prove(model, optimizers, record)


def sgd(model: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters())


def test_what_cannot_be_read_is_listed(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = trained_by(sgd)
    model.register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
    model.register_parameter("nowhere", nn.Parameter(torch.empty(3, device="meta")))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    fingerprint.prove(model, optimizer, fingerprint.of_training(model, optimizer))
    assert "resume verified: 4 states" in caplog.text
    assert "not verified: sparse buffer" in caplog.text
    assert "not verified: nowhere" in caplog.text


@pytest.mark.parametrize("part", ["settings", "others", "partial"])
def test_a_malformed_record_is_an_error_of_ours(part: str) -> None:
    model, optimizer = trained_by(sgd)
    record = {**json.loads(fingerprint.of_training(model, optimizer)), part: {"0.weight": 5}}
    with pytest.raises(fingerprint.FingerprintError):
        fingerprint.prove(model, optimizer, json.dumps(record))


# Placements


@st.composite
def divided(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Any], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    placements = [draw(st.sampled_from([Replicate(), *map(Shard, range(len(shape)))])) for _ in mesh]
    return shape, placements, mesh


@given(divided())
def test_parts_are_those_that_torch_makes(case: tuple[tuple[int, ...], list[Any], tuple[int, ...]]) -> None:
    shape, placements, mesh = case
    whole = torch.arange(int(np.prod(shape))).reshape(shape)
    for coordinate in np.ndindex(mesh):
        expected = whole
        for placement, count, at in zip(placements, mesh, coordinate, strict=True):
            if isinstance(placement, Shard):
                chunks = torch.chunk(expected, count, placement.dim)
                expected = chunks[at] if at < len(chunks) else chunks[0].narrow(placement.dim, 0, 0)
        found = torch.empty_like(expected)
        for part, offsets in runs(indices(shape, placements, mesh, coordinate)):
            own = (slice(at, at + its.stop - its.start) for its, at in zip(part, offsets, strict=True))
            found[part] = whole[tuple(own)]
        assert torch.equal(found, expected)


def test_a_divided_buffer_is_recorded_like_a_parameter() -> None:
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("buffers",))
    model = nn.Linear(2, 2)
    for name, placement in (("divided", Shard(0)), ("equal", Replicate())):
        model.register_buffer(name, DTensor.from_local(torch.ones(4), mesh, [placement], run_check=False))
    found = training_state.live(model, torch.optim.SGD(model.parameters(), 0.1))
    parts = list(found.parts())
    distributed.destroy_process_group()
    buffers = [("divided", (8,)), ("equal", (4,))]
    assert not found.left_out
    assert [(part.parameter, part.box.shape) for part in parts if part.state == OF_BUFFER] == buffers


def test_a_rank_without_elements_of_a_single_number_has_its_settings() -> None:
    """As of CLIP's logit_scale with FSDP2: a rank that failed would leave the others waiting."""
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("scale",))
    model = nn.Module()
    model.scale = nn.Parameter(
        DTensor.from_local(torch.ones(0), mesh, [Shard(0)], run_check=False, shape=(1,), stride=(1,))
    )
    found = training_state.live(model, torch.optim.SGD(model.parameters(), 0.1))
    distributed.destroy_process_group()
    assert found.settings["scale"]["weight_decay"] == 0
    assert not found.left_out
