"""The audit reports what is missing, foreign or contradictory in a checkpoint. Real checkpoints, changed.

`test_removals.py` deletes each part of one file; here are parts of all files, and values that no run has.
"""

import fnmatch
import os
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_patches.audit.audit import DAMAGED, UNKNOWN, WHOLE, audit
from ckpt_patches.formats import torch_file
from crafted_files import Change, both, change, copied, found_in, with_other_value, without
from every_checkpoint import EVERY, TORCH_DIST
from megatron_checkpoints import ZARR, Configuration, written
from torch_dist_indexes import INDEX, changed_index
from universal import parallel
from zero_checkpoints import trained

RANKS = range(8)
MODEL = "mp_rank_00_model_states.pt"
Make = Callable[[Any], object]


def stage(kind: str) -> Path:
    return trained("0.19.8", kind)[kind]


def rank_file(folder: Path, rank: int, model_rank: int = 0) -> Path:
    return next(folder.glob(f"*zero_pp_rank_{rank}_mp_rank_{model_rank:02}_optim_states.pt"))


def base(value: Any) -> Any:
    """The state dict of the inner optimizer in a rank's file."""
    held = value["optimizer_state_dict"]
    return held["base_optimizer_state"] if "base_optimizer_state" in held else held["optimizer_state_dict"]


def of_rank(make: Make) -> Change:
    """Change the inner optimizer's state dict of one rank that owns elements of every group."""

    def apply(folder: Path) -> None:
        every = [
            (rank_file(folder, rank), torch_file.read(rank_file(folder, rank), trust=True).value) for rank in RANKS
        ]
        full = [f for f, held in every if all(held["optimizer_state_dict"].get("param_slice_mappings", [1]))]
        with_other_value(full[-1], lambda value: make(base(value)))

    return apply


def of_all(make: Make) -> Change:
    """Change the inner optimizer's state dict of all ranks."""
    return lambda folder: [with_other_value(rank_file(folder, n), lambda value: make(base(value))) for n in RANKS]


def of_model(make: Make) -> Change:
    """Change the model file, of the second rank at stage 3."""
    return lambda folder: with_other_value(sorted(folder.glob("*model_states.pt"))[:2][-1], make)


def each_state(make: Make) -> Make:
    return lambda value: [make(state) for state in value["state"].values()]


def each_group(**settings: Any) -> Make:
    return lambda value: [group.update(settings) for group in value["param_groups"]]


# States dropped on all ranks, copies of files and swapped ones: damage_kinds.py
OF_ANY_STAGE: dict[str, tuple[Change, str]] = {
    "both states on all ranks": (of_all(lambda value: value["state"].clear()), "missing_state"),
    "a rank's states": (of_rank(lambda value: value["state"].clear()), "missing_state"),
    "one group of a rank": (of_rank(lambda value: value["param_groups"].pop()), "contradiction"),
    "a rank at another step": (of_rank(each_state(lambda state: state.update(step=1.0))), "mixed_steps"),
    "a step below zero": (of_rank(each_state(lambda state: state.update(step=-5.0))), "contradiction"),
    "a learning rate of NaN": (of_all(each_group(lr=float("nan"))), "contradiction"),
    "eps of NaN": (of_all(each_group(eps=float("nan"))), "contradiction"),
    "betas beyond one": (of_all(each_group(betas=(2.0, -1.0))), "contradiction"),
    "another learning rate on one rank": (of_rank(each_group(lr=123.0)), "contradiction"),
    "another weight decay on one rank": (of_rank(each_group(weight_decay=7.0)), "contradiction"),
    "other parallel ranks": (of_model(lambda value: value.update(mp_world_size=2)), "missing_rank"),
}


def a_parallel_rank_at_another_step(folder: Path) -> None:
    for path in folder.glob("*_mp_rank_01_optim_states.pt"):
        with_other_value(path, lambda value: each_state(lambda state: state.update(step=5.0))(base(value)))


OF_ONE: dict[str, tuple[str, Change, str]] = {
    "no module": ("stage1", of_model(lambda value: value.update(module=None)), "missing_weight"),
    "a weight": ("stage1", of_model(lambda value: value["module"].pop("w1.weight")), "missing_weight"),
    "frozen parts": (
        "stage3_frozen",
        of_model(lambda value: value["frozen_param_fragments"].clear()),
        "missing_weight",
    ),
    "a pipe": ("stage1", both(without(MODEL), lambda folder: os.mkfifo(folder / MODEL)), "missing_rank"),
    "a parallel rank": ("megatron", without("*mp_rank_01*"), "missing_rank"),
    "its optimizer": ("megatron", without("*mp_rank_01_optim_states.pt"), "missing_rank"),
    "its model": ("megatron", without("mp_rank_01_model_states.pt"), "missing_rank"),
    "a parallel rank at another step": ("megatron", a_parallel_rank_at_another_step, "mixed_steps"),
}


def check(source: Path, make: Change, expected: str, tmp_path: Path) -> None:
    # Up to 0.13 the converter requires layer files; `trained` adds empty ones.
    ignored = shutil.ignore_patterns("layer_0*") if source.name == "global_step2" else None
    folder = Path(shutil.copytree(source, tmp_path / source.name, ignore=ignored))
    assert found_in(folder) == (WHOLE, set())
    make(folder)
    verdict, found = found_in(folder)
    assert (verdict, expected in found) == (DAMAGED, True), found


@pytest.mark.parametrize("what", OF_ANY_STAGE)
@pytest.mark.parametrize("kind", ["stage1", "stage3"])
def test_of_zero(kind: str, what: str, tmp_path: Path) -> None:
    check(stage(kind), *OF_ANY_STAGE[what], tmp_path)


@pytest.mark.parametrize("what", OF_ONE)
def test_of_one_kind(what: str, tmp_path: Path) -> None:
    kind, make, expected = OF_ONE[what]
    check(parallel(kind)[kind] if kind == "megatron" else stage(kind), make, expected, tmp_path)


def test_groups_at_different_steps_are_unusual(tmp_path: Path) -> None:
    folder = copied(stage("stage1"), tmp_path)
    of_all(lambda value: value["state"][1].update(step=1.0))(folder)
    assert found_in(folder) == (UNKNOWN, {"unusual"})


@pytest.mark.parametrize(("more", "verdict"), [({"d_coef": 1.0}, WHOLE), ({}, UNKNOWN)], ids=["Prodigy's", "Adam's"])
def test_a_step_in_settings_can_begin_at_1_if_they_are_not_adams(
    more: dict[str, float], verdict: str, tmp_path: Path
) -> None:
    folder = copied(stage("stage1"), tmp_path)
    counted = 2
    of_all(each_state(lambda state: state.pop("step")))(folder)
    of_all(lambda value: [group.pop("capturable") for group in value["param_groups"]])(folder)  # torch's own
    of_all(each_group(step=counted + 1, **more))(folder)
    assert found_in(folder)[0] == verdict
    of_all(each_group(step=counted + 2, **more))(folder)
    assert found_in(folder)[0] == UNKNOWN


def test_nested_values_are_shown_in_bounded_time(tmp_path: Path) -> None:
    bomb: Any = ()
    for _ in range(60):
        bomb = (bomb, bomb)
    folder = copied(stage("stage1"), tmp_path)
    of_all(each_state(lambda state: state.update(step=bomb)))(folder)
    of_model(lambda value: value.update(dp_world_size=bomb, global_steps=bomb))(folder)
    report = audit(folder)
    assert report.verdict == DAMAGED
    assert all(len(finding.detail) < 1000 for finding in report.findings)


@pytest.mark.parametrize(
    "value",
    [2_000_000_000, float("inf"), -1, None, "a", [1], 1j, {1: 2, None: 1}, {"a": ["b"]}, Namespace(), [Namespace()]],
    ids=repr,
)
@pytest.mark.parametrize(
    "key", ["mp_world_size", "dp_world_size", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"]
)
def test_a_value_of_another_type_is_no_defect(key: str, value: Any, tmp_path: Path) -> None:
    folder = copied(stage("stage3"), tmp_path)
    change(sorted(folder.glob("*model_states.pt"))[1], lambda held: held.update({key: value}))
    found_in(folder)  # no defect of the audit
    assert audit(folder).checkpoint.data_parallel


@pytest.mark.parametrize("size", [2_000_000_000, "x", float("inf"), -1, None])
def test_no_size_of_a_file_is_believed(size: Any, tmp_path: Path) -> None:
    folder = copied(stage("stage1"), tmp_path)
    of_model(lambda value: value.update(dp_world_size=size))(folder)
    assert found_in(folder)[0] == (WHOLE if size is None else DAMAGED)


# Megatron


def groups_in(common: Any) -> Any:
    """The param groups of the optimizer, or of the first in a chain."""
    optimizer = common["optimizer"]
    while "param_groups" not in optimizer:
        optimizer = next(value for value in optimizer.values() if isinstance(value, dict))
    return optimizer["param_groups"]


def of_common(make: Make) -> Change:
    """Change the state that is not sharded."""
    return lambda folder: with_other_value(folder / "common.pt", make)


def of_group(**settings: Any) -> Change:
    return of_common(lambda value: groups_in(value)[0].update(settings))


def without_arrays(pattern: str) -> Change:
    """Remove arrays from a zarr checkpoint, or from the index of a torch_dist one."""

    def remove(folder: Path) -> None:
        for path in folder.glob(pattern):
            shutil.rmtree(path)
        if (folder / INDEX).exists():
            with changed_index(folder) as index:
                for held in (index.state_dict_metadata, index.storage_data):
                    for key in [key for key in held if fnmatch.fnmatch(getattr(key, "fqn", key), pattern)]:
                        del held[key]

    return remove


OF_MEGATRON: dict[str, tuple[Change, str]] = {
    "all states": (without_arrays("optimizer.state.*"), "missing_state"),
    "the squares": (without_arrays("optimizer.state.exp_avg_sq.*"), "missing_array"),
    "the optimizer": (of_common(lambda value: value.pop("optimizer")), "missing_state"),
    "the groups": (of_common(lambda value: groups_in(value).clear()), "missing_state"),
    "a step below zero": (of_group(step=-5), "contradiction"),
    "no number as the step": (of_group(step="x"), "contradiction"),
    "a rate of NaN": (of_group(lr=float("nan")), "contradiction"),
    "betas beyond one": (of_group(betas=(2.0, -1.0)), "contradiction"),
}
UNUSUAL: dict[str, Change] = {
    "groups at different steps": of_common(lambda v: groups_in(v)[0].update(step=groups_in(v)[0]["step"] + 2)),
    "a multiplier that is no number": of_group(wd_mult=[{}]),
}
BACKENDS = pytest.mark.parametrize("run", [ZARR, TORCH_DIST], ids=str)


@BACKENDS
@pytest.mark.parametrize("what", OF_MEGATRON)
def test_of_megatron(run: Configuration, what: str, tmp_path: Path) -> None:
    check(written(run).whole[-1], *OF_MEGATRON[what], tmp_path)


@BACKENDS
@pytest.mark.parametrize("what", UNUSUAL)
def test_what_is_unusual_of_megatron(run: Configuration, what: str, tmp_path: Path) -> None:
    folder = copied(written(run).whole[-1], tmp_path)
    UNUSUAL[what](folder)
    assert found_in(folder) == (UNKNOWN, {"unusual"})


# Universal


OF_UNIVERSAL: dict[str, tuple[Change, str]] = {
    "a step": (without("zero/w1.weight/step.pt"), "missing_state"),
    "another step": (lambda folder: torch.save(99, folder / "zero/w1.weight/step.pt"), "mixed_steps"),
    "the groups": (without("zero/optimizer_state.pt"), "missing_state"),
}


@pytest.mark.parametrize("what", OF_UNIVERSAL)
def test_of_universal(what: str, tmp_path: Path) -> None:
    check(EVERY["universal of stage 2"].path, *OF_UNIVERSAL[what], tmp_path)


PARALLEL = ["pipeline and tensor parallel", "sub-parameters, uneven", "tensor parallel, frozen weights"]


@pytest.mark.parametrize("kind", PARALLEL)
def test_a_universal_checkpoint_has_what_all_ranks_have_together(kind: str, tmp_path: Path) -> None:
    path = copied(EVERY[f"universal of {kind}"].path, tmp_path)
    assert found_in(path) == (WHOLE, set())
    file = next(path.glob("zero/*/exp_avg.pt"))
    value, whole = torch.load(file), file.read_bytes()
    torch.save({**value, "param": torch.ones(value["param"].numel() + 1)}, file)
    assert found_in(path) == (DAMAGED, {"element_count"})
    file.write_bytes(whole)
    file.unlink()
    assert found_in(path) == (DAMAGED, {"missing_array"})


def test_thousands_of_chunks_in_no_file_are_a_finding_for_each_file(tmp_path: Path) -> None:
    folder, rows, nbytes = tmp_path / "iter_0000001", 64, 1200
    folder.mkdir()
    chunks = [ChunkStorageMetadata(torch.Size([rows * n]), torch.Size([rows])) for n in range(20_000)]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([rows * 20_000]), chunks)
    places = {
        MetadataIndex("w", own.offsets): _StorageInfo(f"__{n % 8}_0.distcp", nbytes * (n // 8), nbytes)
        for n, own in enumerate(chunks)
    }
    (folder / INDEX).write_bytes(pickle.dumps(Metadata({"w": tensor}, storage_data=places)))
    torch.save({}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    report = audit(folder)
    lost = [finding.detail for finding in report.findings if finding.kind.name == "bad_file"]
    assert sorted(lost) == [f"{folder}/__{n}_0.distcp: No such file or directory" for n in range(8)]
    assert report.verdict == DAMAGED
