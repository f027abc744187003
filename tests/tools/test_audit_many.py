"""The rules on single elements and on many: one crafted layer in zarr."""

import json
import random
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, UNKNOWN, WHOLE, Report, audit
from ckpt_patches.audit.judging import scan
from crafted_files import found_in

Arrays = dict[str, npt.NDArray[np.float32]]
STATES = ("fp32_param", "exp_avg", "exp_avg_sq")
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "<f2": np.float16, "<f4": np.float32}


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


def written(path: Path, states: Arrays, master: npt.NDArray[np.float32] | None = None, dtype: str = "bfloat16") -> Path:
    """Write one layer in zarr, as megatron-core does; the weight is from `master`, if given."""
    with np.errstate(over="ignore"):
        weight = (states["fp32_param"] if master is None else master).astype(DTYPES[dtype])
    for name, array, kind in [
        ("layer.weight", weight, dtype),
        *((f"optimizer.state.{state}.layer.weight", states[state], "<f4") for state in STATES),
    ]:
        folder = path / name
        folder.mkdir(parents=True, exist_ok=True)
        metadata = {"shape": array.shape, "chunks": array.shape, "dtype": kind}
        (folder / ".zarray").write_text(json.dumps({**metadata, "compressor": None, "filters": None, "order": "C"}))
        (folder / "0.0").write_bytes(array.tobytes())
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    torch.save({"optimizer": {"param_groups": [{"step": 10, "betas": (0.9, 0.99)}]}}, path / "common.pt")
    return path


def found(report: Report) -> dict[str, tuple[int | None, int | None, str]]:
    return {f.kind.name: (f.begin, f.end, f.detail) for f in report.findings if f.kind.severity != "note"}


# One element, in a layer without any other odd one


ODD: list[tuple[str, float, set[str]]] = [
    *((state, value, {"not_finite"}) for state in STATES for value in (np.nan, np.inf)),
    *((state, -np.inf, {"not_finite"}) for state in STATES[:2]),
    ("exp_avg_sq", -np.inf, {"not_finite", "negative_square"}),
    ("exp_avg_sq", -1.0, {"negative_square"}),
    ("exp_avg_sq", -1e-40, {"negative_square"}),
    *(("exp_avg", value, set()) for value in (0.0, -0.0, 1e-40, -3e38)),
    *(("exp_avg_sq", value, set()) for value in (0.0, -0.0, 1e-40, 3e38)),
    ("fp32_param", 0.0, {"lost_master"}),
    ("fp32_param", 3e38, {"unrounded_master"}),
]


@pytest.mark.parametrize(("state", "value", "expected"), ODD)
def test_a_single_odd_element(state: str, value: float, expected: set[str], tmp_path: Path) -> None:
    states = arrays(64, 16)
    weight = states["fp32_param"].copy()
    states[state][9, 5] = value
    path = written(tmp_path, states, weight)
    assert found_in(path) == (DAMAGED if expected else WHOLE, expected)
    assert {own[:2] for own in found(audit(path)).values()} <= {(149, 150)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rounded_master_agrees_and_every_other_one_not(dtype: str, tmp_path: Path) -> None:
    """Main parameters of all sizes match their rounded weights, also the other side of a tie; none matches others."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, (1 << 8, 1 << 10), np.uint64).astype(np.uint32)
    master = bits.view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        is_sound = np.isfinite(master.astype(DTYPES[dtype]).astype(np.float32)) & (np.abs(master) < 1e30)
    master[~is_sound] = 1.0
    states = {**arrays(*master.shape), "fp32_param": master}
    assert found_in(written(tmp_path, states, dtype=dtype)) == (WHOLE, set())
    unit = {"bfloat16": 1 << 16, "<f2": 1 << 13, "<f4": 0}[dtype]
    one = np.float32(1).view(np.uint32)
    states["fp32_param"] = np.full(master.shape, one + unit // 2, np.uint32).view(np.float32)  # a tie
    for above in (one, one + unit):  # optimizers that store weight and remainder round half up
        weight = np.full(master.shape, above, np.uint32).view(np.float32)
        assert found_in(written(tmp_path, states, weight, dtype)) == (WHOLE, set())
    weight = master.astype(DTYPES[dtype])
    states["fp32_param"] = master.copy()
    shifted = (weight.view({4: np.uint32, 2: np.uint16}[weight.dtype.itemsize]) + 4).view(weight.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        is_other = np.isfinite(shifted.astype(np.float32)) & (master != 0)
    is_other &= np.arange(master.size).reshape(master.shape) % 3 == 0  # of most, nothing tells which are wrong
    path = written(tmp_path, states, np.where(is_other, shifted, weight).astype(np.float32), dtype)
    assert found_in(path) == (DAMAGED, {"unrounded_master"})
    assert found(audit(path))["unrounded_master"][2] == f"{is_other.sum()} elements of these"


def test_small_weights_of_fp16(tmp_path: Path) -> None:
    """Those that fp16 keeps as denormals agree; 2^-15 has the bits of a zero that is moved to fp32's exponent."""
    states = arrays(256, 256)
    states["fp32_param"] = np.linspace(-(2.0**-13), 2.0**-13, 1 << 16).astype(np.float32).reshape(256, 256)
    assert found_in(written(tmp_path, states, dtype="<f2")) == (WHOLE, set())
    weight = states["fp32_param"].copy()
    for number, value in enumerate((0.0, 2.0**-24, -(2.0**-20))):
        states["fp32_param"][100, number], weight[100, number] = 2.0**-15, value
    assert found_in(written(tmp_path, states, weight, "<f2"))[1] & {"unrounded_master", "lost_weight"}


# Many elements


@pytest.mark.parametrize("seed", range(5))
def test_elements_that_are_pruned_at_random_are_no_lost_slices(tmp_path: Path, seed: int) -> None:
    states = arrays(64, 16)
    for state in STATES[1:]:
        states[state] *= np.random.default_rng(seed).random((64, 16)) > 0.9
    assert found_in(written(tmp_path, states)) == (WHOLE, set())


def test_a_slice_is_lost_beside_dead_units_and_rows(tmp_path: Path) -> None:
    states = arrays(64, 16)
    for state in STATES[1:]:
        states[state][:, [2, 5, 6, 11]] = 0  # input units
        states[state][[7, 20, 21, 40]] = 0  # tokens
    assert found_in(written(tmp_path / "whole", states)) == (WHOLE, set())
    for state in STATES[1:]:
        states[state].reshape(-1)[30 * 16 + 3 : 33 * 16 + 9] = 0
    report = audit(written(tmp_path / "damaged", states))
    assert report.verdict == DAMAGED
    assert {name: own[:2] for name, own in found(report).items()} == {"lost_moment": (30 * 16 + 2, 33 * 16 + 9)}


def test_moments_of_tiny_and_of_negative_gradients_are_no_lost_slices(tmp_path: Path) -> None:
    states = arrays(64, 16)
    first, square = (states[state].reshape(-1) for state in STATES[1:])
    first[100:170] *= np.float32(1e-25)
    square[100:170] = 0  # it has underflowed
    first[300:600] = -0.0  # a computed result
    assert found_in(written(tmp_path, states)) == (WHOLE, set())


@pytest.mark.parametrize("state", STATES)
def test_slices_lost_at_random_are_found_to_the_element(state: str, tmp_path: Path) -> None:
    for seed in range(20):
        choose, states = random.Random(seed), arrays(64, 16)
        weight = states["fp32_param"].copy()
        begin = choose.randrange(1000)
        end = choose.randrange(begin + 4, 1025)
        states[state].reshape(-1)[begin:end] = 0
        path = written(tmp_path / str(seed), states, weight)
        kind = "lost_master" if state == "fp32_param" else "lost_moment"
        assert {name: own[:2] for name, own in found(audit(path)).items()} == {kind: (begin, end)}, seed


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


def test_repaired_ranges_are_left_out_of_the_runs() -> None:
    """Hundreds of thousands of both took hours."""
    choose = np.random.default_rng(0)
    for _ in range(300):
        code = choose.choice(np.array([0, 1, 2, 3], np.uint16), 40)
        ranges = [(int(low), int(low) + 1 + int(more)) for low, more in choose.integers(0, 45, (3, 2))]
        expected = code.copy()
        for low, high in ranges:
            expected[low:high] &= 0xFFFE
        found = scan.without(scan.joined([scan.runs_of(code, 0)]), [*ranges, (39, 10**400)], 1)
        expected[39:] &= 0xFFFE
        assert [own.tolist() for own in found[:3]] == [own.tolist() for own in scan.runs_of(expected, 0)[:3]]
    code = np.resize(np.array([1, 0, 0], np.uint16), 600_000)
    ranges = [(low, low + 2) for low in range(0, 600_000, 7)]
    assert len(scan.without(scan.runs_of(code, 0), ranges, 1).begin) == 142_857
