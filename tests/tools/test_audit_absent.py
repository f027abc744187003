"""The audit reports what is missing, foreign or contradictory in a checkpoint. Real checkpoints, changed."""

import fnmatch
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, UNKNOWN, WHOLE, audit
from ckpt_patches.formats.zero import look
from ckpt_patches.formats.zero_inventory import taken_steps
from crafted_files import with_other_value
from every_checkpoint import EVERY
from megatron_checkpoints import ZARR, Configuration, written
from test_audit import TORCH_DIST
from torch_dist_indexes import INDEX, changed_index
from universal import parallel
from zero_checkpoints import trained

Change = Callable[[Path], None]
RANKS = range(8)
MODEL = "mp_rank_00_model_states.pt"


def rank_file(folder: Path, rank: int, model_rank: int = 0) -> Path:
    return folder / look(folder).optimizer[rank, model_rank]


def base(value: Any) -> Any:
    """The state dict of the inner optimizer in a rank's file."""
    optimizer = value["optimizer_state_dict"]
    return (
        optimizer["base_optimizer_state"] if "base_optimizer_state" in optimizer else optimizer["optimizer_state_dict"]
    )


def owner(folder: Path) -> int:
    """A rank that owns elements of every group."""
    whole = {rank: torch_value(rank_file(folder, rank)) for rank in RANKS}
    full = [r for r, value in whole.items() if all(value["optimizer_state_dict"].get("param_slice_mappings", [1]))]
    return full[-1]


def torch_value(path: Path) -> Any:
    found: list[Any] = []
    with_other_value(path, found.append)
    return found[0]


def of_rank(change: Callable[[Any], Any]) -> Change:
    """Change the inner optimizer's state dict of one rank."""
    return lambda folder: _apply(rank_file(folder, owner(folder)), lambda value: change(base(value)))


def of_all(change: Callable[[Any], Any]) -> Change:
    """Change the inner optimizer's state dict of all ranks."""

    def apply(folder: Path) -> None:
        for rank in RANKS:
            _apply(rank_file(folder, rank), lambda value: change(base(value)))

    return apply


def of_model(change: Callable[[Any], Any]) -> Change:
    """Change the model file."""
    return lambda folder: _apply(folder / (look(folder).models.get((None, 0)) or look(folder).models[1, 0]), change)


def _apply(path: Path, change: Callable[[Any], Any]) -> None:
    with_other_value(path, change)


def each_state(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: [change(state) for state in value["state"].values()]


def each_group(**settings: Any) -> Callable[[Any], Any]:
    return lambda value: [group.update(settings) for group in value["param_groups"]]


def copy_of_a_rank(folder: Path) -> None:
    shutil.copy(rank_file(folder, 0), rank_file(folder, 1))


def swapped_ranks(folder: Path) -> None:
    one, other, between = rank_file(folder, 0), rank_file(folder, 1), folder / "between"
    one.rename(between)
    other.rename(one)
    between.rename(other)


OF_ANY_STAGE: dict[str, tuple[Change, set[str]]] = {
    "a rank's states": (of_rank(lambda value: value["state"].clear()), {"missing_state"}),
    "a state on one rank": (of_rank(lambda value: value["state"][0].pop("exp_avg_sq")), {"missing_state"}),
    "a state on all ranks": (of_all(each_state(lambda state: state.pop("exp_avg_sq"))), {"missing_state"}),
    "both states on all ranks": (of_all(lambda value: value["state"].clear()), {"missing_state"}),
    "the step on one rank": (of_rank(each_state(lambda state: state.pop("step"))), {"missing_state"}),
    "the step on all ranks": (of_all(each_state(lambda state: state.pop("step"))), {"missing_state"}),
    "the groups of a rank": (of_rank(lambda value: value.pop("param_groups")), {"contradiction"}),
    "one group of a rank": (of_rank(lambda value: value["param_groups"].pop()), {"contradiction"}),
    "a rank at another step": (of_rank(each_state(lambda state: state.update(step=1.0))), {"mixed_steps"}),
    "a step below zero": (of_rank(each_state(lambda state: state.update(step=-5.0))), {"contradiction"}),
    "a step of NaN": (of_all(each_state(lambda state: state.update(step=float("nan")))), {"contradiction"}),
    "a learning rate of NaN": (of_all(each_group(lr=float("nan"))), {"contradiction"}),
    "eps of NaN": (of_all(each_group(eps=float("nan"))), {"contradiction"}),
    "betas beyond one": (of_all(each_group(betas=(2.0, -1.0))), {"contradiction"}),
    "another learning rate on one rank": (of_rank(each_group(lr=123.0)), {"contradiction"}),
    "another weight decay on one rank": (of_rank(each_group(weight_decay=7.0)), {"contradiction"}),
    "a copy of a rank": (copy_of_a_rank, {"foreign_file"}),
    "two ranks swapped": (swapped_ranks, {"foreign_file"}),
    "other parallel ranks": (of_model(lambda value: value.update(mp_world_size=2)), {"missing_rank"}),
}


@pytest.mark.parametrize(("change", "expected"), OF_ANY_STAGE.values(), ids=OF_ANY_STAGE)
@pytest.mark.parametrize("kind", ["stage1", "stage3"])
def test_of_zero(kind: str, change: Change, expected: set[str], tmp_path: Path) -> None:
    check(trained("0.19.8", kind)[kind], change, expected, tmp_path)


def check(source: Path, change: Change, expected: set[str], tmp_path: Path) -> None:
    # Up to 0.13 the converter requires layer files; `trained` adds empty ones.
    ignored = shutil.ignore_patterns("layer_0*") if source.name == "global_step2" else None
    folder = Path(shutil.copytree(source, tmp_path / source.name, ignore=ignored))
    assert (audit(folder).verdict, [f for f in audit(folder).findings if f.kind.severity != "note"]) == (WHOLE, [])
    change(folder)
    report = audit(folder)
    names = {finding.kind.name for finding in report.findings}
    assert (report.verdict, expected & names) == (DAMAGED, expected), names


MODEL_FILE: list[tuple[Change, set[str]]] = [
    (of_model(lambda value: value.update(module=None)), {"missing_weight"}),
    (of_model(lambda value: value["module"].pop("w1.weight")), {"missing_weight"}),
]


@pytest.mark.parametrize(("change", "expected"), MODEL_FILE, ids=["the module", "a weight"])
def test_of_the_models_file(change: Change, expected: set[str], tmp_path: Path) -> None:
    check(trained("0.19.8", "stage1")["stage1"], change, expected, tmp_path)


def test_groups_at_different_steps_are_unusual(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained("0.19.8", "stage1")["stage1"], tmp_path / "global_step2"))
    of_all(lambda value: value["state"][1].update(step=1.0))(folder)
    report = audit(folder)
    assert (report.verdict, {f.kind.name for f in report.findings if f.kind.severity == "suspicion"}) == (
        UNKNOWN,
        {"unusual"},
    )


@pytest.mark.parametrize(("more", "verdict"), [({"d_coef": 1.0}, WHOLE), ({}, UNKNOWN)], ids=["Prodigy's", "Adam's"])
def test_a_step_in_settings_can_begin_at_1_if_they_are_not_adams(
    more: dict[str, float], verdict: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(trained("0.19.8", "stage1")["stage1"], tmp_path / "global_step2"))
    counted = taken_steps(torch_value(folder / MODEL))
    of_all(each_state(lambda state: state.pop("step")))(folder)
    of_all(lambda value: [group.pop("capturable") for group in value["param_groups"]])(folder)  # torch's own
    of_all(each_group(step=counted + 1, **more))(folder)
    assert audit(folder).verdict == verdict
    of_all(each_group(step=counted + 2, **more))(folder)
    assert audit(folder).verdict == UNKNOWN


def test_a_frozen_fragment_is_missed(tmp_path: Path) -> None:
    change = of_model(lambda value: value["frozen_param_fragments"].clear())
    check(trained("0.19.8", "stage3_frozen")["stage3_frozen"], change, {"missing_weight"}, tmp_path)


@pytest.mark.parametrize("what", ["*mp_rank_01*", "*mp_rank_01_optim_states.pt", "mp_rank_01_model_states.pt"])
def test_a_model_parallel_rank_is_missed(what: str, tmp_path: Path) -> None:
    def remove(folder: Path) -> None:
        for path in folder.glob(what):
            path.unlink()

    check(parallel("megatron")["megatron"], remove, {"missing_rank"}, tmp_path)


def test_a_model_parallel_rank_of_another_step_is_found(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        for (_, model_rank), name in look(folder).optimizer.items():
            if model_rank == 1:
                _apply(folder / name, lambda value: each_state(lambda state: state.update(step=5.0))(base(value)))

    check(parallel("megatron")["megatron"], change, {"mixed_steps"}, tmp_path)


def test_nested_values_are_shown_in_bounded_time(tmp_path: Path) -> None:
    bomb: Any = ()
    for _ in range(60):
        bomb = (bomb, bomb)
    folder = Path(shutil.copytree(trained("0.19.8", "stage1")["stage1"], tmp_path / "global_step2"))
    of_all(each_state(lambda state: state.update(step=bomb)))(folder)
    of_model(lambda value: value.update(dp_world_size=bomb, global_steps=bomb))(folder)
    report = audit(folder)
    assert report.verdict == DAMAGED
    assert all(len(finding.detail) < 1000 for finding in report.findings)


@pytest.mark.parametrize("size", [2_000_000_000, "x", float("inf"), -1, None])
def test_no_size_of_a_file_is_believed(size: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained("0.19.8", "stage1")["stage1"], tmp_path / "global_step2"))
    of_model(lambda value: value.update(dp_world_size=size))(folder)
    assert audit(folder).verdict == (WHOLE if size is None else DAMAGED)


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained("0.19.8", "stage1")["stage1"], tmp_path / "global_step2"))
    (folder / MODEL).unlink()
    os.mkfifo(folder / MODEL)
    assert audit(folder).verdict == DAMAGED


# Megatron


def of_common(change: Callable[[Any], Any]) -> Change:
    """Change the state that is not sharded."""
    return lambda folder: _apply(folder / "common.pt", change)


def groups_in(common: Any) -> Any:
    """The param groups of the optimizer, or of the first in a chain."""
    optimizer = common["optimizer"]
    while "param_groups" not in optimizer:
        optimizer = next(value for value in optimizer.values() if isinstance(value, dict))
    return optimizer["param_groups"]


def without_arrays(pattern: str) -> Change:
    """Remove arrays from a zarr checkpoint, or from the index of a torch_dist one."""

    def remove(folder: Path) -> None:
        for path in folder.glob(pattern):
            shutil.rmtree(path)
        if (folder / INDEX).exists():
            with changed_index(folder) as index:
                for held in (index.state_dict_metadata, index.storage_data):
                    names = {key: getattr(key, "fqn", key) for key in held}
                    for key in (key for key, name in names.items() if fnmatch.fnmatch(name, pattern)):
                        del held[key]

    return remove


OF_MEGATRON: list[tuple[Change, set[str]]] = [
    (without_arrays("optimizer.state.*"), {"missing_state"}),
    (without_arrays("optimizer.state.exp_avg_sq.*"), {"missing_array"}),
    (of_common(lambda value: value.pop("optimizer")), {"missing_state"}),
    (of_common(lambda value: groups_in(value).clear()), {"missing_state"}),
    (of_common(lambda value: groups_in(value)[0].update(step=-5)), {"contradiction"}),
    (of_common(lambda value: groups_in(value)[0].update(step="x")), {"contradiction"}),
    (of_common(lambda value: groups_in(value)[0].update(lr=float("nan"))), {"contradiction"}),
    (of_common(lambda value: groups_in(value)[0].update(betas=(2.0, -1.0))), {"contradiction"}),
]
IDS = [
    "all states",
    "the squares",
    "the optimizer",
    "the groups",
    "a step",
    "no step",
    "a rate",
    "betas",
]


@pytest.mark.parametrize(("change", "expected"), OF_MEGATRON, ids=IDS)
@pytest.mark.parametrize("run", [ZARR, TORCH_DIST], ids=str)
def test_of_megatron(run: Configuration, change: Change, expected: set[str], tmp_path: Path) -> None:
    check(written(run).whole[-1], change, expected, tmp_path)


@pytest.mark.parametrize("run", [ZARR, TORCH_DIST], ids=str)
def test_groups_of_megatron_at_different_steps_are_unusual(run: Configuration, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written(run).whole[-1], tmp_path / "iter_0000003"))
    of_common(lambda value: groups_in(value)[0].update(step=groups_in(value)[0]["step"] + 2))(folder)
    report = audit(folder)
    assert (report.verdict, "unusual" in {finding.kind.name for finding in report.findings}) == (UNKNOWN, True)


@pytest.mark.parametrize("run", [ZARR, TORCH_DIST], ids=str)
def test_a_multiplier_of_megatron_that_is_no_number_is_unusual(run: Configuration, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written(run).whole[-1], tmp_path / "iter_0000003"))
    of_common(lambda value: groups_in(value)[0].update(wd_mult=[{}]))(folder)
    report = audit(folder)
    assert (report.verdict, {f.kind.name for f in report.findings if f.kind.severity == "suspicion"}) == (
        UNKNOWN,
        {"unusual"},
    )


# Universal


def of_parameter(name: str, change: Callable[[Path], Any]) -> Change:
    return lambda folder: change(folder / "zero" / name) and None


OF_UNIVERSAL: list[tuple[Change, set[str]]] = [
    (of_parameter("w1.weight", lambda path: (path / "step.pt").unlink()), {"missing_state"}),
    (of_parameter("w1.weight", lambda path: torch.save(99, path / "step.pt")), {"mixed_steps"}),
    (of_parameter("", lambda path: (path / "optimizer_state.pt").unlink()), {"missing_state"}),
    (of_parameter("w1.weight", lambda path: (path / "exp_avg.pt").unlink()), {"missing_array"}),
]


@pytest.mark.parametrize(("change", "expected"), OF_UNIVERSAL, ids=["a step", "another step", "the groups", "a moment"])
def test_of_universal(change: Change, expected: set[str], tmp_path: Path) -> None:
    check(EVERY["universal of stage 2"].path, change, expected, tmp_path)


def test_thousands_of_chunks_in_no_file_are_a_finding_for_each_file(tmp_path: Path) -> None:
    """Chunks beyond the end of a file are one finding per file."""
    folder, program = tmp_path / "iter_0000001", Path(__file__).parent / "programs/write_index_of_chunks.py"
    subprocess.run([sys.executable, str(program), str(folder), "20000"], check=True)
    report = audit(folder)
    lost = [finding.detail for finding in report.findings if finding.kind.name == "bad_file"]
    assert sorted(lost) == [f"2500 chunks are beyond the end of __{n}_0.distcp, at its byte 0" for n in range(8)]
    assert report.verdict == DAMAGED
