"""Checkpoints with more odd elements than the audit stores: no certain damage is lost."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, UNKNOWN, WHOLE, Report, audit
from ckpt_patches.audit.judging import scan

Arrays = dict[str, npt.NDArray[np.float32]]
STATES = ("fp32_param", "exp_avg", "exp_avg_sq")


def arrays(rows: int, columns: int) -> Arrays:
    """A layer's states, without odd elements."""
    draw = np.random.default_rng(0)
    shape = rows, columns
    master = draw.normal(size=shape).astype(np.float32) + np.float32(0.01)
    return {
        "fp32_param": master,
        "exp_avg": draw.normal(size=shape).astype(np.float32) + np.float32(0.01),
        "exp_avg_sq": draw.uniform(0.1, 1.0, size=shape).astype(np.float32),
    }


def written(path: Path, states: Arrays, master: npt.NDArray[np.float32] | None = None) -> Path:
    """Write one layer in zarr, as megatron-core does; the bf16 weight is from `master`, if given."""
    weight = (states["fp32_param"] if master is None else master).astype(ml_dtypes.bfloat16)
    for name, array, dtype in [
        ("layer.weight", weight, "bfloat16"),
        *((f"optimizer.state.{state}.layer.weight", states[state], "<f4") for state in STATES),
    ]:
        folder = path / name
        folder.mkdir(parents=True)
        metadata = {"shape": array.shape, "chunks": array.shape, "dtype": dtype}
        (folder / ".zarray").write_text(json.dumps({**metadata, "compressor": None, "filters": None, "order": "C"}))
        (folder / "0.0").write_bytes(array.tobytes())
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    torch.save({"optimizer": {"param_groups": [{"step": 10, "betas": (0.9, 0.99)}]}}, path / "common.pt")
    return path


def found(report: Report) -> dict[str, tuple[int | None, int | None, str]]:
    return {f.kind.name: (f.begin, f.end, f.detail) for f in report.findings if f.kind.severity != "note"}


@pytest.mark.parametrize("seed", range(20))
def test_elements_that_are_pruned_at_random_are_no_lost_slices(tmp_path: Path, seed: int) -> None:
    states = arrays(64, 16)
    for state in STATES[1:]:
        states[state] *= np.random.default_rng(seed).random((64, 16)) > 0.9
    report = audit(written(tmp_path, states))
    assert (report.verdict, found(report)) == (WHOLE, {})


def test_a_slice_is_lost_beside_dead_units_and_rows(tmp_path: Path) -> None:
    states = arrays(64, 16)
    for state in STATES[1:]:
        states[state][:, [2, 5, 6, 11]] = 0  # input units
        states[state][[7, 20, 21, 40]] = 0  # tokens
    assert audit(written(tmp_path / "whole", states)).verdict == WHOLE
    for state in STATES[1:]:
        states[state].reshape(-1)[30 * 16 + 3 : 33 * 16 + 9] = 0
    report = audit(written(tmp_path / "damaged", states))
    assert report.verdict == DAMAGED
    assert {name: own[:2] for name, own in found(report).items()} == {"lost_moment": (30 * 16 + 2, 33 * 16 + 9)}


@pytest.mark.parametrize("state", STATES)
def test_more_nan_than_are_kept_are_counted_exactly(
    tmp_path: Path, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "MAX_RUNS", 1000)
    states = arrays(1000, 64)
    states[state].reshape(-1)[101:-7:3] = np.nan
    report = audit(written(tmp_path / "damaged", states))
    count = len(range(101, 64_000 - 7, 3))
    assert found(report)["not_finite"] == (101, 101 + 3 * (count - 1) + 1, f"{count} elements of these")
    assert report.verdict == DAMAGED


def test_what_is_left_out_of_a_list_is_not_called_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more zero ranges than the audit stores, the verdict is UNKNOWN."""
    monkeypatch.setattr(scan, "MAX_RUNS", 100)
    states = arrays(1000, 64)
    for state in STATES[1:]:
        states[state][::2, :20] = 0
    report = audit(written(tmp_path / "many", states))
    assert (report.verdict, set(found(report))) == (UNKNOWN, {"not_judged"})
