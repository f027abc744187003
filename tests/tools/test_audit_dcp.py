"""Audit and repair torch.distributed.checkpoint folders, as training scripts write them."""

import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, REPAIRED, UNKNOWN, WHOLE, Report, audit
from ckpt_patches.cli import main
from ckpt_patches.formats import damages
from ckpt_patches.formats.checkpoint import EXP_AVG, EXP_AVG_SQ, MASTER
from ckpt_patches.formats.chunked import Chunked
from ckpt_patches.formats.dcp import Optimizer
from ckpt_patches.formats.dcp import optimizers as names_of
from ckpt_patches.formats.torch_dist import INDEX, Tensor
from dcp_checkpoints import generated, saved, saved_generated
from upstream import newest, once, run, tree

SOUND = [
    *("fsdp", "step-9", "hsdp", "fsdp_tp", "tp", "ddp", "one_rank", "bf16", "raw", "weights", "folders", "async"),
    *("fresh", "first", "groups", "zeros", "tied", "sgd", "adagrad", "adafactor", "frozen", "unused"),
]
UNSURE = {
    "strided": {"not_judged"},
    "fsdp1_flat_raw": {"unusual"},  # the states of one rank's part of each flat parameter
    "fsdp1_local": {"unusual"},
    "step-1000": {"unusual"},  # a new optimizer, as after a load without its state
}
WRONG = {
    "nan_weight": "not_finite",
    "nan_moment": "not_finite",
    "lost_moment": "lost_moment",
    "lost_square": "lost_moment",
    "lost_weight": "lost_master",
    "negative": "negative_square",
    "infinite": "not_finite",
    "minus_infinite": "not_finite",
}


def names(report: Report) -> set[str]:
    return {finding.kind.name for finding in report.findings if finding.kind.severity != damages.NOTE}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_one_is_whole(name: str) -> None:
    report = audit(saved() / name)
    assert (report.verdict, names(report)) == (WHOLE, set())


@pytest.mark.parametrize(
    ("name", "noted"), [("frozen", {"rare"}), ("unused", {"rare"}), ("raw", {"numbered_states"}), ("weights", set())]
)
def test_what_is_left_out_is_noted(name: str, noted: set[str]) -> None:
    report = audit(saved() / name)
    assert {finding.kind.name for finding in report.findings} >= noted
    assert report.checkpoint.format.endswith("weights alone") == (not noted)


@pytest.mark.parametrize("name", UNSURE)
def test_what_is_unusual_is_said(name: str) -> None:
    report = audit(saved() / name)
    assert (report.verdict, names(report)) == (UNKNOWN, UNSURE[name])


@pytest.mark.parametrize("name", WRONG)
def test_damage_in_what_was_saved_is_found(name: str) -> None:
    report = audit(saved() / name)
    assert (report.verdict, names(report)) == (DAMAGED, {WRONG[name]})


@pytest.mark.slow
def test_no_sound_one_is_damaged_whatever_the_options() -> None:
    """Generated checkpoints are WHOLE, or UNKNOWN if a param group has a parameter without a gradient."""
    for name, case in generated().items():
        report = audit(saved_generated() / name)
        without_gradient = {"frozen", "unused"} & case["options"].keys() and case["save"] != "weights"
        assert (report.verdict, names(report)) in [(WHOLE, set()), (UNKNOWN, {"unusual"})], case
        assert report.verdict == WHOLE or without_gradient, case


def test_states_of_ranks_parts_that_contradict_one_another_are_damage() -> None:
    """A raw `optimizer.state_dict()` of FSDP1 with original parameters: the first moment is of another rank."""
    report = audit(saved() / "fsdp1_raw")
    assert (report.verdict, names(report)) == (DAMAGED, {"contradiction", "unusual"})


def test_a_best_loss_before_the_first_one_is_no_damage(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved() / "fsdp", tmp_path / "fsdp"))
    callbacks = {"EarlyStopping": {"wait_count": 0, "best_score": torch.tensor(float("inf"))}}
    torch.save({"callbacks": callbacks}, folder / "meta.pt")
    report = audit(folder)
    assert (report.verdict, names(report)) == (WHOLE, set())


# Files


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved() / "fsdp", tmp_path / "fsdp"))


def flip(path: Path) -> None:
    extent = next(s for s in audit(path).checkpoint.shards if s.numel > 10).streams["exp_avg"].extents[0]
    data = bytearray(Path(extent.path).read_bytes())
    data[extent.offset + 1] ^= 1
    Path(extent.path).write_bytes(data)


def cut(path: Path) -> None:
    file = path / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-5000])


@pytest.mark.parametrize(
    ("damage", "verdict"),
    [
        (lambda path: (path / "__2_0.distcp").unlink(), DAMAGED),
        (cut, DAMAGED),
        (flip, DAMAGED),
        (lambda path: (path / INDEX).unlink(), INCOMPLETE),
    ],
    ids=["a rank's file missing", "cut", "a bit", "no index"],
)
def test_a_file_is_missing_or_changed(damage: Callable[[Path], object], verdict: str, whole: Path) -> None:
    damage(whole)
    report = audit(whole)
    assert (report.verdict, names(report)) == (verdict, {"incomplete_save" if verdict == INCOMPLETE else "bad_file"})


def test_a_ranks_file_with_other_steps_than_the_others_is_suspicious(whole: Path) -> None:
    shutil.copyfile(saved() / "step-9" / "__1_0.distcp", whole / "__1_0.distcp")
    report = audit(whole)
    (suspicion,) = (own for own in report.findings if own.kind.severity != "note")
    assert (report.verdict, suspicion.kind.name) == (UNKNOWN, "unusual")
    assert "step 9 in __1_0.distcp" in suspicion.detail


def test_an_optimizer_without_its_index_is_incomplete(tmp_path: Path) -> None:
    path = Path(shutil.copytree(saved() / "folders", tmp_path / "folders"))
    (path / "optimizer_0" / INDEX).unlink()
    report = audit(path)
    assert (report.verdict, names(report)) == (INCOMPLETE, {"incomplete_save"})


# The index


def changed(path: Path, change: Callable[[Any], object]) -> None:
    """Change the index of a checkpoint."""
    index = pickle.loads((path / INDEX).read_bytes())
    change(index)
    (path / INDEX).write_bytes(pickle.dumps(index))


def removed(index: Any, name: str) -> None:
    del index.state_dict_metadata[name]
    for key in [key for key in index.storage_data if key.fqn == name]:
        del index.storage_data[key]


def entries(path: Path) -> list[str]:
    return list(pickle.loads((path / INDEX).read_bytes()).state_dict_metadata)


# A buffer looks like a tensor of the script's own. A load that misses a setting raises an error.
PROMISED = ("lr", "betas", "params")


def is_promised(name: str) -> bool:
    is_setting = name.startswith("optimizer.param_groups.")
    return name.endswith(PROMISED) if is_setting else name not in ("model.positions", "step")


def test_every_entry_is_missed(whole: Path) -> None:
    index = (whole / INDEX).read_bytes()
    unnoticed = []
    for name in entries(whole):
        changed(whole, lambda found, name=name: removed(found, name))  # type: ignore[misc]
        if audit(whole, workers=1).verdict == WHOLE:
            unnoticed.append(name)
        (whole / INDEX).write_bytes(index)
    assert unnoticed
    assert not list(filter(is_promised, unnoticed))


def test_a_step_that_was_saved_as_an_object_is_no_defect(whole: Path) -> None:
    def as_object(found: Any) -> None:
        name = next(name for name in found.state_dict_metadata if name.endswith(".step"))
        found.state_dict_metadata[name] = BytesStorageMetadata()
        (key,) = (key for key in found.storage_data if key.fqn == name)
        found.storage_data[MetadataIndex(name)] = found.storage_data.pop(key)

    changed(whole, as_object)
    report = audit(whole, workers=1)
    assert (report.verdict, names(report)) == (WHOLE, set())


def test_every_chunk_is_missed(whole: Path) -> None:
    index = (whole / INDEX).read_bytes()

    def without_last_chunk(found: Any, name: str) -> None:
        entry = found.state_dict_metadata[name]
        key = next(k for k in found.storage_data if k.fqn == name and k.offset == entry.chunks[-1].offsets)
        del entry.chunks[-1], found.storage_data[key]

    for name in [name for name in entries(whole) if name.endswith((".weight", ".exp_avg"))]:
        changed(whole, lambda found, name=name: without_last_chunk(found, name))  # type: ignore[misc]
        assert "fragments" in names(audit(whole, workers=1)), name
        (whole / INDEX).write_bytes(index)


def test_shapes_of_states_and_weights_agree(whole: Path) -> None:
    def transposed(found: Any) -> None:
        found.state_dict_metadata["model.head.weight"] = found.state_dict_metadata["model.embed.weight"]
        entry = found.state_dict_metadata["optimizer.state.norm.weight.exp_avg"]
        entry.size, entry.chunks[-1].sizes = torch.Size([25]), torch.Size([7])

    changed(whole, transposed)
    assert "contradiction" in names(audit(whole))


@pytest.mark.parametrize(
    ("chunks", "why"),
    [
        ({(0, 0): (2, 4), (2, 0): (2, 4)}, ""),
        ({(0, 0): (4, 1), (0, 1): (4, 3)}, ""),
        ({(0, 0): (2, 4), (1, 0): (2, 4)}, "overlaps"),
        ({(0, 0): (2, 4)}, "8 elements"),
        ({(0, 0): (2, 4), (3, 0): (2, 4)}, "beyond"),
        ({(0, 0): (4, 4), (4, 0): (0, 4)}, ""),
    ],
)
def test_chunks_are_to_tile_a_tensor(chunks: dict[tuple[int, ...], tuple[int, ...]], why: str) -> None:
    found = Chunked(Tensor("weight", "float32", (4, 4), None, chunks)).untiled()
    assert why in found
    assert bool(why) == bool(found)


def index_of(*optimizers: str, models: tuple[str, ...]) -> list[Optimizer]:
    """The optimizers in an index of two parameters, which every optimizer steps and every model has."""
    states = [f"{own}state.{name}.exp_avg" for own in optimizers for name in ("up.weight", "norm.bias")]
    weights = [f"{own}{name}" for own in models for name in ("up.weight", "norm.bias", "positions")]
    return names_of([*states, *weights], [f"{own}param_groups.0.lr" for own in optimizers])


@pytest.mark.parametrize(
    ("optimizers", "models", "expected"),
    [
        (("optimizer.",), ("model.",), ["model."]),
        (("",), ("",), [""]),
        (("app.optim.",), ("app.model.",), ["app.model."]),  # torch's tutorial
        (("state.optimizers.AdamW.",), ("state.model.",), ["state.model."]),  # Composer's
        (("optimizer.",), ("model.", "ema."), ["model."]),
        (
            ("actor.optimizer.", "critic.optimizer."),
            ("actor.model.", "critic.model."),
            ["actor.model.", "critic.model."],
        ),
        (("optimizer.",), ("first.", "second."), [None]),
    ],
)
def test_weights_are_those_of_their_optimizer(
    optimizers: tuple[str, ...], models: tuple[str, ...], expected: list[str | None]
) -> None:
    found = index_of(*optimizers, models=models)
    assert [own.prefix for own in found] == list(optimizers)
    assert [own.states.keys() == {"up.weight", "norm.bias"} for own in found] == [True] * len(found)
    assert [own.weights.get("up.weight") for own in found] == [
        None if one is None else f"{one}up.weight" for one in expected
    ]
    assert [bool(own.several) for own in found] == [one is None for one in expected]


# Megatron-FSDP


@pytest.fixture(scope="module")
def by_megatron() -> Path:
    """A Megatron-FSDP checkpoint of Megatron-LM in `fsdp_dtensor`. Tests must not change it."""
    release = tree("megatron-core", newest("megatron-core"))
    write = partial(run, "megatron_fsdp_saving", tree=release)
    return once("megatron-fsdp", write) / "iter_0000001"


def test_megatron_fsdps_weights_are_found(by_megatron: Path) -> None:
    report = audit(by_megatron)
    assert (report.verdict, names(report), report.checkpoint.step) == (WHOLE, set(), 3)
    trained = {s.parameter for s in report.checkpoint.shards if s.streams.keys() == {MASTER, EXP_AVG, EXP_AVG_SQ}}
    assert trained == {"model.module.a.weight", "model.module.b.weight"}
    assert main(["audit", str(by_megatron.parent)]) == 0


def test_every_entry_of_megatron_fsdp_is_missed(by_megatron: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(by_megatron, tmp_path / by_megatron.name))
    index = (path / INDEX).read_bytes()
    promised = [
        name
        for name in entries(path)
        if name.startswith(("model.", "optimizer.state.")) or name.endswith((".lr", ".betas"))
    ]
    assert len(promised) == 2 + 2 * 3 + 2 * 2
    for name in promised:
        changed(path, lambda found, name=name: removed(found, name))  # type: ignore[misc]
        assert audit(path, workers=1).verdict != WHOLE, name
        (path / INDEX).write_bytes(index)


# Repair


def test_a_lost_moment_is_taken_from_an_older_checkpoint(tmp_path: Path) -> None:
    older, new = saved() / "fsdp", tmp_path / "new"
    assert main(["repair", str(saved() / "lost_moment"), "--output", str(new), "--from", str(older)]) == 0
    assert audit(new).verdict == REPAIRED
    name = "optimizer.state.layers.1.up.weight.exp_avg"
    for path in (new, older):
        value = torch.zeros(48, 24)
        dcp.load({name: value}, checkpoint_id=path)
        assert value.view(-1)[288:576].any()
