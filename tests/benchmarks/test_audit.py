"""Compare the audit's speed with `cat` of the same files (warm cache, 2 workers); print its memory (`make bench`)."""

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from upstream import run_json

ELEMENTS = 1 << 24  # per parameter
PARAMETERS = 16
CAT, CAT_FP16, MEMORY = 0.7, 0.65, 1.0  # targets: fraction of cat's speed, and GB


def arrays(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A weight, its main parameter and the moments after a step that changed every element."""
    master = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0)) * 0.02
    gradient = master * 0.01 + 1e-4
    return {"weight": master.to(dtype), "fp32_param": master, "exp_avg": gradient, "exp_avg_sq": gradient.square()}


def write_zarr(folder: Path, dtype: torch.dtype) -> Path:
    """Write zarr as Megatron-LM does, one chunk per array."""
    folder.mkdir()
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    torch.save({"optimizer": {"param_groups": [{"step": 3, "betas": (0.9, 0.95)}]}}, folder / "common.pt")
    names = {torch.bfloat16: "bfloat16", torch.float16: "<f2", torch.float32: "<f4"}
    values = arrays(dtype)
    for number in range(PARAMETERS):
        for key, tensor in values.items():
            array = folder / (f"layer{number}" if key == "weight" else f"optimizer.state.{key}.layer{number}")
            array.mkdir()
            shape = {"shape": [ELEMENTS // 4096, 4096], "chunks": [ELEMENTS // 4096, 4096]}
            fixed = {"compressor": None, "filters": None, "order": "C", "fill_value": None, "zarr_format": 2}
            (array / ".zarray").write_text(json.dumps({**shape, **fixed, "dtype": names[tensor.dtype]}))
            tensor.view(torch.uint8).numpy().tofile(array / "0.0")
    return folder


def write_universal(folder: Path, dtype: torch.dtype) -> Path:
    """Write files with torch.save. The audit also verifies their checksums."""
    values = arrays(dtype)
    names = [f"layer{number}" for number in range(PARAMETERS)]
    for name in names:
        (folder / "zero" / name).mkdir(parents=True)
        for key, file in (("fp32_param", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            torch.save({"param": values[key]}, folder / "zero" / name / f"{file}.pt")
    groups = [{"params": list(range(PARAMETERS)), "lr": 1e-3, "betas": (0.9, 0.95), "step": 3}]
    torch.save({"optimizer_state_dict": {"param_groups": groups}}, folder / "zero" / "optimizer_state.pt")
    torch.save(
        {
            "module": {name: values["weight"].clone() for name in names},
            "param_shapes": [{name: torch.Size([ELEMENTS]) for name in names}],
            **dict.fromkeys(("dp_world_size", "mp_world_size"), 1),
            "global_steps": 3,
            "skipped_steps": 0,
            "lr_scheduler": None,
        },
        folder / "mp_rank_00_model_states.pt",
    )
    return folder


def write_dcp(folder: Path, dtype: torch.dtype) -> Path:
    """Save with torch.distributed.checkpoint as a training script does; an fp32 weight is its own main parameter."""
    values = arrays(dtype)
    names = [f"layer{number}.weight" for number in range(PARAMETERS)]
    main = {"master_param": values["fp32_param"]} if dtype is not torch.float32 else {}
    moments = {"exp_avg": values["exp_avg"], "exp_avg_sq": values["exp_avg_sq"]}
    states = {name: {"step": torch.tensor(3.0), **moments, **main} for name in names}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "params": names}]
    weights = dict.fromkeys(names, values["weight"])
    dcp.save({"model": weights, "optimizer": {"state": states, "param_groups": groups}}, checkpoint_id=folder)
    return folder


@pytest.mark.parametrize(
    ("write", "dtype"),
    [
        (write_zarr, torch.bfloat16),
        (write_zarr, torch.float16),
        (write_zarr, torch.float32),
        (write_universal, torch.bfloat16),
        (write_dcp, torch.bfloat16),
        (write_dcp, torch.float32),
    ],
    ids=lambda value: str(getattr(value, "__name__", value)).removeprefix("torch."),
)
def test_speed_and_memory(write: Callable[[Path, torch.dtype], Path], dtype: torch.dtype, tmp_path: Path) -> None:
    found = run_json("audit_speed", write(tmp_path / "checkpoint", dtype), tree=tmp_path)
    shutil.rmtree(tmp_path / "checkpoint")  # pytest would keep it, and those of earlier runs
    ratios = [cat / own for cat, own in zip(found["cat"], found["audit"], strict=True)]
    figure = CAT_FP16 if dtype is torch.float16 else CAT
    speed = {what: found["bytes"] / statistics.median(found[what]) / 1e9 for what in ("cat", "audit")}
    print(
        f"\naudit, {write.__name__} {dtype}, {found['bytes'] / 1e9:.1f} GB: {statistics.median(ratios):.2f} of cat's "
        f"speed (figure to reach: {figure}; pairs: {', '.join(f'{ratio:.2f}' for ratio in ratios)})"
    )
    cpu = statistics.median(own / cat for cat, own in zip(found["cat_cpu"], found["audit_cpu"], strict=True))
    print(f"  processor time {cpu:.2f} times cat's, on two workers")
    print(f"  {speed['audit']:.1f} GB/s, cat {speed['cat']:.1f} GB/s")
    print(f"  memory {found['peak'] / 1e9:.2f} GB, workers and all (figure to reach: {MEMORY})")
    assert np.isfinite(ratios).all()
