"""Healthy checkpoints that look unusual are never called damaged."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, WHOLE, audit
from ckpt_patches.convert.convert import Options, convert
from every_checkpoint import EVERY, put, tensors
from test_audit import names
from zero_checkpoints import trained

MODEL = "mp_rank_00_model_states.pt"
MASK = torch.full((4, 4), float("-inf")).triu(1)


def with_buffer(tmp_path: Path, buffer: torch.Tensor) -> Path:
    """A real ZeRO checkpoint with one more buffer in the model."""
    folder = Path(shutil.copytree(trained("0.19.8", "stage1")["stage1"], tmp_path / "global_step2"))
    value: Any = torch.load(folder / MODEL, weights_only=False)
    value["module"]["mask"] = buffer
    torch.save(value, folder / MODEL)
    return folder


@pytest.mark.parametrize(
    ("buffer", "verdict", "found"),
    [
        (MASK.bfloat16(), WHOLE, set()),
        (torch.where(torch.arange(16).view(4, 4) == 5, MASK[0, 1], 1.0), WHOLE, set()),
        (-MASK, WHOLE, set()),
        (torch.tensor(float("inf")), WHOLE, set()),
        (torch.where(MASK == 0, torch.nan, MASK), DAMAGED, {"not_finite"}),
    ],
    ids=["a mask", "a single infinity", "positive infinity", "a best loss before the first one", "NaN"],
)
def test_infinity_in_a_buffer_can_be_right_and_nan_cannot(
    buffer: torch.Tensor, verdict: str, found: set[str], tmp_path: Path
) -> None:
    report = audit(with_buffer(tmp_path, buffer))
    assert (report.verdict, names(report)) == (verdict, found)


@pytest.mark.parametrize("infinity", [float("-inf"), float("inf")])
def test_a_trained_weight_that_is_infinite_is_damage(infinity: float, tmp_path: Path) -> None:
    folder = with_buffer(tmp_path, MASK)
    value: Any = torch.load(folder / MODEL, weights_only=False)
    value["module"]["w1.weight"][0, 0] = infinity
    torch.save(value, folder / MODEL)
    assert names(audit(folder)) >= {"not_finite"}


def test_where_no_parameter_is_known_to_be_trained_infinity_is_not_detected(tmp_path: Path) -> None:
    """Buckets of Megatron do not name their parameters: an infinite weight is not told from a buffer."""
    folder = Path(shutil.copytree(EVERY["0.14, torch"].path, tmp_path / "iter_0000003"))
    weight = next(place for place in tensors(folder) if place.dtype == "bfloat16" and place.name.endswith("weight"))
    put(weight, torch.full((2,), float("-inf"), dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    report = audit(folder)
    assert (report.verdict, names(report)) == (WHOLE, set())


def universal_with_buffer(tmp_path: Path, buffer: torch.Tensor) -> Path:
    """A real universal checkpoint: the conversion keeps a buffer in two places."""
    folder = with_buffer(tmp_path, buffer)
    value: Any = torch.load(folder / MODEL, weights_only=False)
    value["buffer_names"] = [*value["buffer_names"], "mask"]
    torch.save(value, folder / MODEL)
    convert(folder, tmp_path / "universal", Options(workers=1))
    assert (tmp_path / "universal/zero/mask/fp32.pt").exists()
    return tmp_path / "universal"


def test_a_mask_that_was_converted_is_judged_as_before(tmp_path: Path) -> None:
    report = audit(universal_with_buffer(tmp_path, MASK))
    assert (report.verdict, names(report, notes=True) - {"no_optimizer_state"}) == (WHOLE, set())


def test_a_mask_of_which_one_copy_is_damaged_is_damage(tmp_path: Path) -> None:
    folder = universal_with_buffer(tmp_path, MASK)
    torch.save({"param": torch.zeros(16)}, folder / "zero/mask/fp32.pt")
    assert audit(folder).verdict == DAMAGED


def test_a_trained_parameter_without_moments_that_is_infinite_is_damage(tmp_path: Path) -> None:
    """Infinity in a weight and its main parameter is damage without moments too, as with SGD."""
    folder = universal_with_buffer(tmp_path, MASK)
    weight = folder / "zero/w1.weight"
    for file in weight.glob("exp_avg*.pt"):
        file.unlink()
    torch.save({"param": torch.full((9,), float("-inf"))}, weight / "fp32.pt")
    (model,) = folder.glob("mp_rank*.pt")
    value: Any = torch.load(model, weights_only=False)
    value["module"]["w1.weight"].fill_(float("-inf"))
    torch.save(value, model)
    assert "not_finite" in names(audit(folder))


def test_what_pads_a_frozen_parameter_of_zero_3_is_not_judged_after_a_conversion(tmp_path: Path) -> None:
    """NaN in the last ranks' padding, which is uninitialized memory, is not damage; NaN in elements is."""
    name, source = "ln.weight", trained("0.19.8", "stage3_frozen")["stage3_frozen"]
    convert(source, tmp_path / "universal", Options(workers=1))
    files = sorted((tmp_path / "universal").glob("zero_pp_rank_*_model_states.pt"))
    for file, verdict in ((files[-1], WHOLE), (files[0], DAMAGED)):  # the first 3 of 8 ranks have one element each
        value: Any = torch.load(file, weights_only=False)
        value["frozen_param_fragments"][name].fill_(torch.nan)
        torch.save(value, file)
        assert audit(tmp_path / "universal").verdict == verdict
