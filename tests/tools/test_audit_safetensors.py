"""Folders of safetensors, with and without the torch optimizer that Accelerate and Transformers write beside it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, UNKNOWN, WHOLE, Report, audit
from ckpt_patches.cli import main
from ckpt_patches.formats import damages, safetensors, torch_file
from ckpt_patches.formats.files_reader import WEIGHTS_ALONE, WITH_OPTIMIZER
from crafted_files import with_other_value
from dcp_checkpoints import saved_by_ranks
from every_checkpoint import in_torch_file, put

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
OPTIMIZER = "optimizer.bin"
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}


def names(report: Report) -> set[str]:
    return {finding.kind.name for finding in report.findings if finding.kind.severity != damages.NOTE}


def written(
    path: Path, tensors: dict[str, torch.Tensor], change: Callable[[Any], object] = lambda header: None
) -> None:
    """Write a file by the format's specification."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        own = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(own)]
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += own
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def trained(steps: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 8))
    model.register_buffer("positions", torch.arange(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(torch.randn(16, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A folder as Accelerate's `save_state` writes it."""
    model, optimizer = trained()
    path = tmp_path / "checkpoint-3"
    path.mkdir()
    written(path / ONE, model.state_dict())
    torch.save(optimizer.state_dict(), path / OPTIMIZER)
    torch.save({"last_epoch": 3}, path / "scheduler.bin")
    torch.save({"step": 3, "torch_manual_seed": torch.get_rng_state()}, path / "random_states_0.pkl")
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = tmp_path / "sharded"
    path.mkdir()
    tensors = dict(trained()[0].state_dict())
    parts = [dict(list(tensors.items())[:2]), dict(list(tensors.items())[2:])]
    for file, part in zip(SHARDS, parts, strict=True):
        written(path / file, part)
    listed = {name: file for file, part in zip(SHARDS, parts, strict=True) for name in part}
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": listed}))
    return path


def test_sound_ones_are_whole(state: Path, sharded: Path) -> None:
    for path, kind in ((state, WITH_OPTIMIZER), (sharded, WEIGHTS_ALONE)):
        report = audit(path)
        assert (report.verdict, names(report), report.checkpoint.format) == (WHOLE, set(), kind)
    assert audit(state).checkpoint.step == 3


def test_types_of_all_kinds_are_read(tmp_path: Path) -> None:
    written(
        tmp_path / ONE, {"a": torch.ones(3, dtype=torch.bfloat16), "empty": torch.ones(0, 4), "one": torch.tensor(1.0)}
    )
    assert audit(tmp_path).verdict == WHOLE
    written(tmp_path / ONE, {"a": torch.ones(4)}, lambda header: header["a"].update(dtype="F4", shape=[32]))
    assert names(audit(tmp_path)) == {"not_read"}


def test_weights_are_missing_or_of_torch(state: Path) -> None:
    (state / ONE).unlink()
    assert names(audit(state)) >= {"missing_weight"}
    weights = trained()[0].state_dict()
    torch.save(weights, state / "pytorch_model.bin")
    assert audit(state).verdict == WHOLE
    (state / "pytorch_model.bin").rename(state / "pytorch_model-00001-of-00001.bin")
    index = {"weight_map": dict.fromkeys(weights, "pytorch_model-00001-of-00001.bin")}
    (state / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert audit(state).verdict == WHOLE
    (state / "pytorch_model-00001-of-00001.bin").unlink()
    assert names(audit(state)) >= {"bad_file"}


# The header


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.pop("b"),
        lambda header: header["b"].pop("dtype"),
        lambda header: header["b"].pop("shape"),
        lambda header: header["b"].pop("data_offsets"),
        lambda header: header["b"].update(dtype="F64"),
        lambda header: header["b"].update(dtype=4),
        lambda header: header["b"].update(shape=[5]),
        lambda header: header["b"].update(shape=[-2, -2]),
        lambda header: header["b"].update(shape=[2.0, 2.0]),
        lambda header: header["b"].update(shape=[1 << 62, 4]),
        lambda header: header["b"].update(data_offsets=[8, 24]),
        lambda header: header["b"].update(data_offsets=[32, 48]),
        lambda header: header["b"].update(data_offsets=[28, 12]),
        lambda header: header["b"].update(data_offsets=[0, 16]),
        lambda header: header.update(c=header["b"]),
        lambda header: header.update(b=[1, 2]),
    ],
)
def test_a_wrong_header_is_found(tmp_path: Path, change: Callable[[Any], object]) -> None:
    written(tmp_path / ONE, {"a": torch.ones(3), "b": torch.ones(2, 2)}, change)
    report = audit(tmp_path)
    assert (report.verdict, names(report)) == (DAMAGED, {"bad_file"})


def test_a_file_that_is_cut_anywhere_is_found(tmp_path: Path) -> None:
    written(tmp_path / ONE, {"a": torch.ones(3), "b": torch.ones(2, 2)})
    data = (tmp_path / ONE).read_bytes()
    for size in range(len(data)):
        (tmp_path / ONE).write_bytes(data[:size])
        with pytest.raises(torch_file.BadFileError):
            safetensors.read(tmp_path / ONE)
    (tmp_path / ONE).write_bytes(data + b"\0")
    assert names(audit(tmp_path)) == {"bad_file"}


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 8 + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{]",
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        (13).to_bytes(8, "little") + b'{"a":1,"a":1}',
    ],
)
def test_what_is_no_header_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ONE).write_bytes(data)
    assert names(audit(tmp_path)) == {"bad_file"}


# The index


@pytest.mark.parametrize("file", SHARDS)
def test_a_shard_is_missing_or_cut(sharded: Path, file: str) -> None:
    data = (sharded / file).read_bytes()
    (sharded / file).write_bytes(data[:-4])
    assert names(audit(sharded)) == {"bad_file"}
    (sharded / file).unlink()
    assert names(audit(sharded)) == {"bad_file"}


def changed(path: Path, change: Callable[[Any], object]) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index)
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda index: index["weight_map"].update(other=SHARDS[0]), {"missing_weight"}),
        (lambda index: index["weight_map"].update({"0.weight": SHARDS[1]}), {"contradiction"}),
        (lambda index: index["weight_map"].pop("0.weight"), {"unusual"}),
        (lambda index: index.pop("weight_map"), {"bad_metadata", "unusual"}),
        (lambda index: index.update(weight_map={"a": "../a.safetensors"}), {"bad_metadata", "unusual"}),
    ],
)
def test_the_index_and_the_files_agree(sharded: Path, change: Callable[[Any], object], expected: set[str]) -> None:
    changed(sharded, change)
    assert names(audit(sharded)) == expected


def test_files_that_no_index_lists_are_named(sharded: Path) -> None:
    shutil.copy(sharded / SHARDS[0], sharded / ONE)
    assert (audit(sharded).verdict, names(audit(sharded))) == (UNKNOWN, {"unusual"})
    (sharded / ONE).unlink()
    (sharded / INDEX).unlink()
    assert names(audit(sharded)) == {"unusual"}


# Elements


def test_odd_elements_of_weights_are_found(tmp_path: Path) -> None:
    written(tmp_path / ONE, {"a": torch.ones(300), "b": torch.tensor([1, float("nan"), float("inf")])})
    assert (audit(tmp_path).verdict, names(audit(tmp_path))) == (DAMAGED, {"not_finite"})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [("exp_avg", "nan", "not_finite"), ("exp_avg_sq", "-1", "negative_square"), ("exp_avg_sq", "", "lost_moment")],
)
def test_odd_elements_of_an_optimizer_are_found(state: Path, key: str, value: str, expected: str) -> None:
    place = next(p for p in in_torch_file(state / OPTIMIZER) if p.name == f"state.0.{key}")
    put(place, torch.tensor(float(value)).numpy().tobytes() if value else bytes(place.nbytes // 2))
    assert (audit(state).verdict, names(audit(state))) == (DAMAGED, {expected})


# The optimizer

# Other settings cannot be checked without another param group, and a load without one raises an error.
PROMISED = ("state", "param_groups", "params", "lr", "betas")


def test_every_key_of_the_optimizer_is_missed(state: Path) -> None:
    data = (state / OPTIMIZER).read_bytes()
    value = torch_file.read(state / OPTIMIZER, trust=True).value
    every: list[tuple[Any, ...]] = [(key,) for key in value]
    every += [
        ("state", number, *rest) for number in value["state"] for rest in ((), *((k,) for k in value["state"][0]))
    ]
    every += [("param_groups", 0, key) for key in value["param_groups"][0] if key in PROMISED]

    def removed(found: Any, path: tuple[Any, ...]) -> None:
        for key in path[:-1]:
            found = found[key]
        del found[path[-1]]

    for path in every:
        with_other_value(state / OPTIMIZER, lambda found, path=path: removed(found, path))  # type: ignore[misc]
        report = audit(state, workers=1)
        is_like_a_frozen_one = path[0] == "state" and len(path) == 2
        assert (report.verdict != WHOLE) != is_like_a_frozen_one, path
        assert not is_like_a_frozen_one or "rare" in {finding.kind.name for finding in report.findings}
        (state / OPTIMIZER).write_bytes(data)


def test_an_optimizer_of_another_model_is_unusual(state: Path) -> None:
    value = torch.load(state / OPTIMIZER)
    value["state"][0]["exp_avg"] = value["state"][0]["exp_avg_sq"] = torch.ones(5, 5)
    torch.save(value, state / OPTIMIZER)
    assert "unusual" in names(audit(state))
    (state / OPTIMIZER).unlink()
    assert names(audit(state)) == {"missing_state"}  # Accelerate's scheduler, but no optimizer
    (state / "global_step3").mkdir()
    assert audit(state).verdict == WHOLE


# A run's folder


def test_a_trainers_checkpoint_below_is_audited_too(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights and a checkpoint in a folder beside them, as Transformers saves with DeepSpeed, are both audited."""
    inner = shutil.copytree(saved_by_ranks(2) / "fsdp2", sharded / "inner")
    assert main(["audit", str(sharded)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if f": {WHOLE} (" in line] == [str(sharded), str(inner)]
    assert f"resume from: {inner}" in lines[-1]
