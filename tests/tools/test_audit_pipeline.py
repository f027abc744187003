"""Pipeline weights in layer files: missing files, and weights that differ from main parameters. A real run, changed."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, UNKNOWN, WHOLE, Report, audit
from ckpt_patches.convert import source
from ckpt_patches.errors import UserError
from ckpt_patches.formats.zero_pipeline import Place, places
from crafted_files import copied, with_other_value
from test_convert_tied_stages import trained
from upstream import newest, run_json, tree

pytestmark = pytest.mark.slow

TIED, LINEAR, NORM = (f"layer_{number:02d}-model_states.pt" for number in range(3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copied(trained() / "global_step2", tmp_path)


def found(report: Report) -> list[tuple[str, str]]:
    return [(finding.kind.name, finding.array) for finding in report.findings]


def negate(path: Path, key: str) -> None:
    """Negate a weight in a layer's file."""
    layer = torch.load(path)
    torch.save({**layer, key: -layer[key]}, path)


def test_what_the_run_wrote_is_whole(folder: Path) -> None:
    assert (audit(folder).verdict, found(audit(folder))) == (WHOLE, [])


def test_a_record_that_cannot_be_compared_is_said(folder: Path) -> None:
    """A universal checkpoint, by which states are compared, does not hold such a pipeline."""
    for path in folder.glob("mp_rank_*_model_states.pt"):
        with_other_value(
            path, lambda held: held.update(ckpt_patches_fingerprint={"global_steps": held["global_steps"]})
        )
    assert (audit(folder).verdict, found(audit(folder))) == (UNKNOWN, [("not_judged", "the optimizer's state")])


@pytest.mark.parametrize("file", [LINEAR, NORM])
def test_the_file_of_a_layer_is_missing(folder: Path, file: str) -> None:
    (folder / file).unlink()
    assert (audit(folder).verdict, found(audit(folder))) == (DAMAGED, [("missing_weight", file)])
    with pytest.raises(UserError, match=f"is damaged or incomplete: missing_weight: {file}: the file is missing"):
        source.read(folder)


def test_the_file_of_a_tied_layer_is_missing(folder: Path) -> None:
    (folder / TIED).unlink()
    of_each_stage = [("missing_weight", "tied_modules.embedding.weight")] * 2
    assert (audit(folder).verdict, found(audit(folder))) == (DAMAGED, of_each_stage)


@pytest.mark.parametrize(
    ("file", "key", "where"),
    [(TIED, "weight", "tied_modules.embedding.weight"), (LINEAR, "weight", LINEAR), (NORM, "bias", NORM)],
)
def test_a_weight_of_a_layer_is_missing(folder: Path, file: str, key: str, where: str) -> None:
    with_other_value(folder / file, lambda value: value.pop(key))
    assert audit(folder).verdict == DAMAGED
    assert set(found(audit(folder))) == {("missing_weight", where)}


@pytest.mark.parametrize(
    ("file", "key", "array"),
    [(TIED, "weight", "tied_modules.embedding.weight"), (LINEAR, "bias", "1.bias"), (NORM, "weight", "2.weight")],
)
def test_a_weight_is_not_its_main_parameter_rounded(folder: Path, file: str, key: str, array: str) -> None:
    negate(folder / file, key)
    report = audit(folder)
    assert report.verdict == DAMAGED
    assert {name for name, _ in found(report)} == {"unrounded_master"}
    assert all(where.startswith(array) for _, where in found(report))


def test_of_layers_that_look_the_same_none_is_taken_for_the_tied_one(folder: Path) -> None:
    shutil.copy(folder / TIED, folder / "layer_03-model_states.pt")
    negate(folder / TIED, "weight")
    assert audit(folder).verdict == WHOLE


def test_a_frozen_layer_is_no_tied_one(folder: Path) -> None:
    """A frozen layer, which its number identifies, is not taken for the tied one."""
    shape = torch.load(folder / TIED)["weight"].shape
    shutil.copy(folder / TIED, folder / "layer_03-model_states.pt")
    for model in sorted(folder.glob("mp_rank_*_model_states.pt")):
        with_other_value(model, lambda value: value.update(frozen_param_shapes={"3.weight": shape}))
    negate(folder / TIED, "weight")
    assert "unrounded_master" in {name for name, _ in found(audit(folder))}


def test_tensor_parallel_ranks_have_files_of_their_own() -> None:
    names = [f"layer_{number:02d}-model_{rank:02d}-model_states.pt" for number in range(2) for rank in range(2)]
    shapes = {"1.weight": (4, 4), "2.bias": (4,), "scale": (1,)}
    assert places(shapes, names, 3) == {  # rank 1 of the second stage
        "1.weight": Place("layer_01-model_01-model_states.pt", "weight"),
        "2.bias": Place("layer_02-model_01-model_states.pt", "bias"),  # absent
    }


@pytest.mark.parametrize(
    ("dtype", "stages", "tied"), [("fp32", 1, False), ("fp32", 2, True), ("fp16", 1, True), ("fp16", 2, False)]
)
def test_without_zero_the_file_of_a_trained_layer_is_missing(
    dtype: str, stages: int, tied: bool, tmp_path: Path
) -> None:
    """No file names the parameters: the shapes of the optimizer's states show that a layer is absent.

    The weight of a shared layer is in two files, so that one of three files with its shape
    is not missed; a load refuses it.
    """
    case = {"stage": 0, "pipeline": stages, "dtype": dtype, "tied": tied, "buffers": True}
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps([{**case, "kind": "a pipeline", "seed": 1, "folder": str(tmp_path)}]))
    run_json("deepspeed_kinds", cases, "--ranks", "2", tree=tree("deepspeed", newest("deepspeed")), delivery="hook")
    folder = tmp_path / "judged" / "global_step4"
    assert (audit(folder).verdict, found(audit(folder))) == (WHOLE, [])
    layers = [file for file in sorted(folder.glob("layer_*")) if torch.load(file)]
    assert len(layers) == 7
    for file in layers:
        content = file.read_bytes()
        file.unlink()
        is_square = file.name in [f"layer_{number:02d}-model_states.pt" for number in (0, 5, 6)]
        assert (audit(folder).verdict == DAMAGED) == (not (tied and is_square)), file.name
        file.write_bytes(content)


def test_without_zero_flat_states_of_more_elements_than_the_layers(tmp_path: Path) -> None:
    """FusedAdam's states are flat, one tensor for each group."""
    flat = {"exp_avg": torch.ones(20), "exp_avg_sq": torch.ones(20), "step": 1}
    optimizer = {"state": {0: flat}, "param_groups": [{"betas": (0.9, 0.99), "eps": 1e-8, "params": [0]}]}
    wrapper = {"optimizer_state_dict": optimizer, "fp32_groups_flat": [torch.ones(20)], "dynamic_loss_scale": False}
    model = {"module": None, "optimizer": {**wrapper, "cur_scale": 1.0, "cur_iter": 1}, "global_steps": 1}
    torch.save(model, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({"weight": torch.ones(4, 4).half()}, tmp_path / TIED)
    torch.save({"weight": torch.ones(4).half()}, tmp_path / LINEAR)
    missing = ("missing_weight", "layer_*-model_states.pt")
    assert missing not in found(audit(tmp_path))
    (tmp_path / LINEAR).unlink()
    assert missing in found(audit(tmp_path))
