"""Audit torch.distributed.checkpoint folders, as training scripts write them."""

import itertools
import pickle
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from ckpt_patches.audit.audit import DAMAGED, INCOMPLETE, UNKNOWN, WHOLE, audit
from ckpt_patches.cli import main
from ckpt_patches.formats import dcp
from ckpt_patches.formats.checkpoint import EXP_AVG, EXP_AVG_SQ, MASTER
from ckpt_patches.formats.chunked import TOO_MANY, Chunked
from ckpt_patches.formats.torch_dist import INDEX, Tensor
from ckpt_patches.formats.torch_file import NotReadError
from crafted_files import Change, copied, found_in, names
from dcp_checkpoints import saved
from every_checkpoint import put, tensors
from test_fingerprint_dcp_files import Model, flattened, training
from test_fingerprint_dcp_files import saved as written
from upstream import newest, once, run, tree

# Other meshes, types, groups and optimizers are drawn by healthy_kinds.py, and damage of elements by damage_kinds.py.
VERDICTS: dict[str, tuple[str, set[str]]] = {
    **dict.fromkeys(("fsdp", "step-9", "hsdp", "one_rank", "raw", "weights", "folders", "fresh"), (WHOLE, set())),
    **dict.fromkeys(("sgd", "adafactor", "frozen", "unused"), (WHOLE, set())),
    "strided": (UNKNOWN, {"not_judged"}),
    "fsdp1_flat_raw": (UNKNOWN, {"unusual"}),  # the states of one rank's part of each flat parameter
    "fsdp1_local": (UNKNOWN, {"unusual"}),
    "step-1000": (UNKNOWN, {"unusual"}),  # a new optimizer, as after a load without its state
    # A raw `optimizer.state_dict()` of FSDP1 with original parameters: the first moment is of another rank.
    "fsdp1_raw": (DAMAGED, {"contradiction", "unusual"}),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_what_was_saved(name: str) -> None:
    assert found_in(saved() / name) == VERDICTS[name]


@pytest.mark.parametrize(
    ("name", "noted"), [("frozen", {"rare"}), ("unused", {"rare"}), ("raw", {"numbered_states"}), ("weights", set())]
)
def test_what_is_left_out_is_noted(name: str, noted: set[str]) -> None:
    report = audit(saved() / name)
    assert {finding.kind.name for finding in report.findings} >= noted
    assert report.checkpoint.format.endswith("weights alone") == (not noted)


@pytest.mark.parametrize(
    ("name", "tensor", "value", "expected"),
    [
        ("fsdp", "model.layers.1.up.weight", 0.0, "lost_master"),  # beside moments that are not zero
        ("sgd", "model.norm.weight", torch.inf, "not_finite"),
        ("sgd", "model.norm.weight", -torch.inf, "not_finite"),
    ],
)
def test_weights_alone_tell(name: str, tensor: str, value: float, expected: str, tmp_path: Path) -> None:
    path = copied(saved() / name, tmp_path)
    place = next(place for place in tensors(path) if place.name.startswith(tensor))
    put(place, torch.full((place.numel // 2,), value).numpy().tobytes())
    assert found_in(path) == (DAMAGED, {expected})


# Files and the index


def in_index(make: Callable[[Any], object]) -> Change:
    def apply(path: Path) -> None:
        index = pickle.loads((path / INDEX).read_bytes())
        make(index)
        (path / INDEX).write_bytes(pickle.dumps(index))

    return apply


def flip(path: Path) -> None:
    extent = next(s for s in audit(path).checkpoint.shards if s.numel > 10).streams["exp_avg"].extents[0]
    data = bytearray(Path(extent.path).read_bytes())
    data[extent.offset + 1] ^= 1
    Path(extent.path).write_bytes(data)


def cut(path: Path) -> None:
    file = path / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-5000])


def with_best_loss(path: Path) -> None:
    callbacks = {"EarlyStopping": {"wait_count": 0, "best_score": torch.tensor(float("inf"))}}
    torch.save({"callbacks": callbacks}, path / "meta.pt")


def a_step_as_object(index: Any) -> None:
    name = next(name for name in index.state_dict_metadata if name.endswith(".step"))
    index.state_dict_metadata[name] = BytesStorageMetadata()
    (key,) = (key for key in index.storage_data if key.fqn == name)
    index.storage_data[MetadataIndex(name)] = index.storage_data.pop(key)


def without_last_chunk(index: Any) -> None:
    entry = index.state_dict_metadata["model.head.weight"]
    last = entry.chunks.pop()
    (key,) = (k for k in index.storage_data if k.fqn == "model.head.weight" and k.offset == last.offsets)
    del index.storage_data[key]


def sized(*size: int) -> Callable[[Any], object]:
    return lambda index: setattr(index.state_dict_metadata["model.head.weight"], "size", torch.Size(size))


def larger_first_chunk(index: Any) -> None:
    chunk = index.state_dict_metadata["model.head.weight"].chunks[0]
    chunk.sizes = torch.Size((chunk.sizes[0] + 2, chunk.sizes[1]))


def transposed(index: Any) -> None:
    index.state_dict_metadata["model.head.weight"] = index.state_dict_metadata["model.embed.weight"]
    entry = index.state_dict_metadata["optimizer.state.norm.weight.exp_avg"]
    entry.size, entry.chunks[-1].sizes = torch.Size([25]), torch.Size([7])


OF_FSDP: dict[str, tuple[Change, str, str]] = {
    "a rank's file missing": (lambda path: (path / "__2_0.distcp").unlink(), DAMAGED, "bad_file"),
    "a file cut": (cut, DAMAGED, "bad_file"),
    "a bit": (flip, DAMAGED, "bad_file"),
    "no index": (lambda path: (path / INDEX).unlink(), INCOMPLETE, "incomplete_save"),
    "a rank's file with other steps": (
        lambda path: shutil.copyfile(saved() / "step-9" / "__1_0.distcp", path / "__1_0.distcp"),
        UNKNOWN,
        "unusual",
    ),
    "a best loss before the first one": (with_best_loss, WHOLE, ""),
    "a step as an object": (in_index(a_step_as_object), WHOLE, ""),
    "a chunk missing": (in_index(without_last_chunk), DAMAGED, "fragments"),
    "chunks beyond the tensor": (in_index(sized(30, 24)), DAMAGED, "fragments"),
    "a tensor beyond its chunks": (in_index(sized(40, 24)), DAMAGED, "fragments"),
    "chunks that overlap": (in_index(larger_first_chunk), DAMAGED, "fragments"),
    "states and weights of other shapes": (in_index(transposed), DAMAGED, "contradiction"),
}


@pytest.mark.parametrize("what", OF_FSDP)
def test_files_and_index(what: str, tmp_path: Path) -> None:
    make, verdict, expected = OF_FSDP[what]
    path = copied(saved() / "fsdp", tmp_path)
    make(path)
    found = found_in(path)
    assert (found[0], {expected} - {""} <= found[1]) == (verdict, True), found
    details = [own.detail for own in audit(path).findings if own.kind.name == "unusual"]
    assert what != "a rank's file with other steps" or "step 9 in __1_0.distcp" in details[0]


def test_an_optimizer_without_its_index_is_incomplete(tmp_path: Path) -> None:
    path = copied(saved() / "folders", tmp_path)
    (path / "optimizer_0" / INDEX).unlink()
    assert found_in(path) == (INCOMPLETE, {"incomplete_save"})


# Where trainers put models and optimizers


def titan(model: Model, optimizer: Model) -> Model:
    """TorchTitan: weights at the top, beside a flattened optimizer, a scheduler and the trainer's step."""
    own = {"lr_scheduler": {"last_epoch": 3}, "train_state": {"step": torch.tensor(3)}}
    return {**model, "optimizer": flattened(optimizer), **own}


Layout = Callable[[Model, Model], Model]
LAYOUTS: dict[str, Layout] = {
    "TorchTitan": titan,
    "Lightning": lambda model, optimizer: {"state_dict": model, "optimizer_0": optimizer},
    "torch's tutorial": lambda model, optimizer: {"app": {"model": model, "optim": optimizer}},
    "Composer": lambda model, optimizer: {"state": {"model": model, "optimizers": {"AdamW": optimizer}}},
    "an average beside the model": lambda model, optimizer: {"model": model, "ema": model, "optimizer": optimizer},
    "two models": lambda model, optimizer: {
        name: {"model": model, "optimizer": optimizer} for name in ("actor", "critic")
    },
    "an optimizer of another name": lambda model, optimizer: {
        "gen": {"model": model, "opt": optimizer},
        "disc": {"model": model},
    },
    "another model beside it": lambda model, optimizer: {
        "student": model,
        "model": {"0.weight": torch.ones(2)},
        "optimizer": optimizer,
    },
    "optimizers by the models' names": lambda model, optimizer: {
        **dict.fromkeys("GD", model),
        **{f"optimizer_{name}": optimizer for name in "GD"},
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_of_their_optimizer(layout: str, tmp_path: Path) -> None:
    model, optimizer, _ = training()
    path = written(tmp_path / "step-3", LAYOUTS[layout](model, optimizer))
    torch.save({"epoch": 0, "global_step": 3, "lr_schedulers": [], "loops": {}}, path / "meta.pt")  # Lightning's
    report = audit(path)
    assert (report.verdict, names(report), report.checkpoint.step) == (WHOLE, set(), 3)
    assert report.checkpoint.format == "torch.distributed.checkpoint"
    trained = [s for s in report.checkpoint.shards if {MASTER, EXP_AVG, EXP_AVG_SQ} <= s.streams.keys()]
    assert len(trained) == 6 * (2 if layout in ("two models", "optimizers by the models' names") else 1)
    optimizer["state"]["0.weight"]["exp_avg"][0, 0] = torch.nan
    path = written(tmp_path / "damaged" / "step-3", LAYOUTS[layout](model, optimizer))
    assert found_in(path) == (DAMAGED, {"not_finite"})
    next(path.glob("*.distcp")).unlink()
    assert found_in(path)[0] == DAMAGED


def crafted(dtype: torch.dtype = torch.float32) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Weights in bf16, and states that 1,500 steps of AdamW could have left."""
    made = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(32, 32, generator=made).bfloat16() for name in ("in.weight", "out.weight")}
    weights["scale"] = torch.tensor([2.66]).bfloat16()
    states = {}
    for name, weight in weights.items():
        gradient = torch.rand(weight.shape, generator=made) * 1e-3 + 1e-5
        moments = {"exp_avg": gradient.to(dtype), "exp_avg_sq": (gradient.square() + 1e-6).to(dtype)}
        states[name] = {"step": torch.tensor(1500.0), **moments, "master_param": weight.float() * (1 + 1e-3)}
    return weights, states


def lose(states: dict[str, dict[str, torch.Tensor]]) -> None:
    """A slice of one moment, beside units of another parameter whose first moment has decayed to zero."""
    states["in.weight"]["exp_avg"][:, 5:10] = 0
    states["out.weight"]["exp_avg"].view(-1)[37:437] = 0


CRAFTED: dict[str, tuple[torch.dtype, Callable[[Any], object], tuple[str, set[str]]]] = {
    "units whose first moment has decayed": (
        torch.float32,
        lambda states: states["in.weight"]["exp_avg"][:, 5:10].zero_(),
        (WHOLE, set()),
    ),
    "a lost slice beside them": (torch.float32, lose, (DAMAGED, {"lost_moment"})),
    "a main parameter of one element": (
        torch.float32,
        lambda states: states["scale"]["master_param"].zero_(),
        (DAMAGED, {"lost_master"}),
    ),
    "squares below fp16": (
        torch.float16,
        lambda states: states["in.weight"]["exp_avg_sq"].view(-1)[40:400].zero_(),
        (WHOLE, set()),
    ),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_zeros_in_states(case: str, tmp_path: Path) -> None:
    dtype, change, expected = CRAFTED[case]
    weights, states = crafted(dtype)
    change(states)
    groups = [
        {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "params": [*weights]}
    ]
    path = tmp_path / "iter_0001500"  # no name that megatron-core alone gives
    assert (
        found_in(written(path, {"model": weights, "optimizer": {"state": states, "param_groups": groups}})) == expected
    )


@pytest.mark.parametrize("names", [("first", "second"), ("model", "module")])
def test_where_several_models_could_be_meant_none_is_taken(names: tuple[str, str], tmp_path: Path) -> None:
    model, optimizer, _ = training()
    report = audit(written(tmp_path, {**dict.fromkeys(names, model), "optimizer": optimizer}))
    assert report.verdict == UNKNOWN
    assert not [shard for shard in report.checkpoint.shards if {MASTER, EXP_AVG} <= shard.streams.keys()]


@pytest.mark.parametrize(("axes", "why"), [(9, ""), (14, TOO_MANY)])
def test_chunks_along_many_axes_are_compared_within_bounds(axes: int, why: str) -> None:
    corners = [*itertools.product(range(2), repeat=axes)]
    assert Chunked(Tensor("weight", "float32", (2,) * axes, None, dict.fromkeys(corners, (1,) * axes))).untiled() == why


# Megatron-FSDP


def test_megatron_fsdps_weights_are_found() -> None:
    """A checkpoint of Megatron-LM in `fsdp_dtensor`."""
    release = tree("megatron-core", newest("megatron-core"))
    path = once("megatron-fsdp", partial(run, "megatron_fsdp_saving", tree=release)) / "iter_0000001"
    report = audit(path)
    assert (report.verdict, names(report), report.checkpoint.step) == (WHOLE, set(), 3)
    trained = {s.parameter for s in report.checkpoint.shards if s.streams.keys() == {MASTER, EXP_AVG, EXP_AVG_SQ}}
    assert trained == {"model.module.a.weight", "model.module.b.weight"}
    assert main(["audit", str(path.parent)]) == 0


def test_each_of_thousands_of_parameters_can_have_its_own_optimizer() -> None:
    """As with hooks that step in the backward pass. Half a megabyte of names took half a minute."""
    states = [f"optimizers.{n}.state.layer.{n}.weight.{state}" for n in range(4000) for state in ("step", "exp_avg")]
    begin = time.process_time()
    found = dcp.optimizers([*states, *(f"model.layer.{n}.weight" for n in range(4000))], [])
    assert time.process_time() - begin < 3
    assert {own.prefix: own.weights for own in found} == {
        f"optimizers.{n}.": {f"layer.{n}.weight": f"model.layer.{n}.weight"} for n in range(4000)
    }


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        (["state." * 101 + "exp_avg"], "expected names of at most 100 parts, found 'state"),
        (
            [f"{n}.state.w.step" for n in range(4000)] + [f"{n}.w" for n in range(4000)],
            "expected at most 10000000 place",
        ),
    ],
    ids=["parts", "places"],
)
def test_names_of_which_few_make_gigabytes_are_not_read(tensors: list[str], match: str) -> None:
    with pytest.raises(NotReadError, match=match):
        dcp.optimizers(tensors, [])
