"""Compare a fingerprint's time with NumPy's sum of the same state, on one core (`make bench`)."""

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckpt_patches import fingerprint
from ckpt_patches.fingerprint import element_hash
from upstream import newest, run_json, tree

NEWEST = newest("megatron-core")
NUMEL = 1 << 26  # 256 MiB
PAIRS = 15


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def test_beside_reading_the_state_once() -> None:
    state = np.random.default_rng(0).standard_normal(NUMEL, np.float32)
    bits = state.view(np.uint32)
    element_hash.of_run(bits[: 1 << 20], 0)  # builds the table
    pairs = [(seconds(state.sum), seconds(lambda: element_hash.of_run(bits, 0))) for _ in range(PAIRS)]
    speed = statistics.median(one / other for one, other in pairs)
    rate = state.nbytes / statistics.median(other for _, other in pairs) / 1e9
    print(f"\nfingerprint: {speed:.2f} times the speed of NumPy's sum; {rate:.1f} GB/s a core")


PEAK = """
import resource
import torch
from ckpt_patches.fingerprint.boxes import Box
from ckpt_patches.fingerprint.live_state import Part, sums


def part(numel):
    shape = (numel // 4096, 4096)
    return Part("weight", "master", Box((0, 0), shape, shape), 0, torch.full((numel,), 0.5, dtype=torch.DTYPE), True)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


torch.set_num_threads(4)
sums([part(1 << 22)], main=True)  # what is imported and made once
state = part(1 << 28)
before = peak()
sums([state], main=True)
print(state.values.nbytes, peak() - before)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_beside_the_state(dtype: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEAK.replace("DTYPE", dtype)], check=True, stdout=subprocess.PIPE, text=True
    )
    nbytes, beside = map(int, done.stdout.split())
    print(f"\n{nbytes / 1e9:.1f} GB of {dtype}: {beside / 1e6:.0f} MB beside it (figure to reach: 64)")


def test_saves_and_loads_with_it_and_without(tmp_path: Path) -> None:
    """No module for fingerprints is imported with the switch off."""
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(3):
        for name, env in (
            ("on", {"CKPT_PATCHES_FINGERPRINT": "1"}),
            ("off", {}),
            ("no package", {"CKPT_PATCHES": "off"}),
        ):
            one = run_json(
                "fingerprint_cost", tmp_path / "out", tree=tree("megatron-core", NEWEST), delivery="hook", env=env
            )
            found.setdefault(name, []).append(one)
    assert {name: any(one["modules"] for one in own) for name, own in found.items()} == {
        "on": True,
        "off": False,
        "no package": False,
    }
    times = {
        name: [sum(map(statistics.median, (one["saves"], one["loads"]))) for one in own] for name, own in found.items()
    }
    print(f"\nof a save and a load of {found['on'][0]['bytes'] / 1e6:.0f} MB on one rank, in page cache:")
    for name, other in (("on", "off"), ("off", "no package")):
        ratio = statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))
        print(f"  {name}: {ratio:.2f} times the time of {other}")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_beside_dcp_save(device: str, tmp_path: Path) -> None:
    """A model of 256 MiB with Adam's states: the fingerprint of all of it, and a save to a local disk."""
    model = torch.nn.Linear(1 << 13, 1 << 13, bias=False, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1 << 13, device=device)).sum().backward()
    optimizer.step()
    pairs = []
    for number in range(6):
        saved = seconds(
            partial(
                dcp.save,
                dict(zip("mo", get_state_dict(model, optimizer), strict=True)),
                checkpoint_id=tmp_path / str(number),
            )
        )
        shutil.rmtree(tmp_path / str(number))
        pairs.append((seconds(lambda: fingerprint.of_training(model, optimizer)), saved))
    share = statistics.median(one / other for one, other in pairs[1:])
    print(f"\n{device}: fingerprint in {share:.1%} of the time of dcp.save (figure to reach: 5 %)")
