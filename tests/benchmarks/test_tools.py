"""Time the tools beside what they compete with, in alternating pairs of runs, and print the figures (`make bench`)."""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckpt_patches import fingerprint
from universal import command, differences, environment
from upstream import environment_for, newest, run, tree

PAIRS = 5
VERSION = newest("deepspeed")


def seconds(function: Callable[[], object]) -> float:
    os.sync()  # no run waits for the writes of an earlier one
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def ratio(own: Callable[[], object], other: Callable[[], object]) -> tuple[float, float, float]:
    """The medians of both, in seconds, and that of their ratios. The first pair is a warm-up."""
    pairs = [(seconds(own), seconds(other)) for _ in range(PAIRS + 1)][1:]
    medians = (statistics.median(times) for times in zip(*pairs, strict=True))
    return next(medians), next(medians), statistics.median(one / two for one, two in pairs)


def ran(arguments: list[str], env: dict[str, str] | None = None) -> str:
    return subprocess.run(arguments, env=env, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_audit_beside_cat(dtype: torch.dtype, tmp_path: Path) -> None:
    """Of 2 to 4 GB in the format of torch.distributed.checkpoint, with two workers."""
    main = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)) * 0.02
    moments = {"exp_avg": main * 0.01 + 1e-4, "exp_avg_sq": (main * 0.01 + 1e-4).square()}
    names = [f"layer{number}.weight" for number in range(16)]
    state = {"step": torch.tensor(3.0), **moments, **({"master_param": main} if dtype is not torch.float32 else {})}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "params": names}]
    optimizer = {"state": dict.fromkeys(names, state), "param_groups": groups}
    dcp.save({"model": dict.fromkeys(names, main.to(dtype)), "optimizer": optimizer}, checkpoint_id=tmp_path)
    files = [str(path) for path in sorted(tmp_path.iterdir())]
    audit = [sys.executable, "-m", "ckpt_patches", "audit", str(tmp_path), "--workers", "2"]
    own, cat, slower = ratio(lambda: ran(audit), partial(subprocess.run, ["cat", *files], stdout=subprocess.DEVNULL))
    peak = 3 * 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # the command and its two workers
    print(f"\naudit, {dtype}: {own:.2f} s, cat {cat:.2f} s: {1 / slower:.2f} of cat's speed (figure to reach: 0.7)")
    print(f"  memory at most {peak / 1e9:.2f} GB (figure to reach: 1)")
    shutil.rmtree(tmp_path)  # pytest would keep it, and those of earlier runs


@pytest.mark.parametrize("case", ["large_stage1", "large_stage3"])
def test_converter_beside_upstreams_and_cp(case: str, tmp_path: Path) -> None:
    """1.2 GB of state: ZeRO-1 on 768 ranks and ZeRO-3 on 64, 194 parameters. Upstream's runs once."""
    run("write_parallel_checkpoint", tmp_path, case, tree=tree("deepspeed", VERSION), timeout=600)
    source, outputs = tmp_path / case / "global_step7", iter(range(100))
    plans: list[float] = []

    def ours() -> None:
        said = ran(command(source, tmp_path / f"ours{next(outputs)}", "--json"), environment(VERSION))
        plans.append(json.loads(said)["plan_seconds"])

    own, copy, _ = ratio(ours, lambda: shutil.copytree(source, tmp_path / f"copy{next(outputs)}"))
    folders = ["--input_folder", str(source), "--output_folder", str(tmp_path / "upstream")]
    workers = ["--num_extract_workers", "2", "--num_merge_workers", "2"]  # with two processors, the fastest
    env = {**environment_for(tree("deepspeed", VERSION), "hook"), "CKPT_PATCHES_SKIP": "universal_converter"}
    del env["OMP_NUM_THREADS"]
    module = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    theirs = seconds(lambda: ran([*module, *folders, *workers], env))
    plan = statistics.median(plans)
    print(f"\n{case}: {own:.2f} s, upstream {theirs:.1f} s: {theirs / own:.1f} times as fast (figure to reach: 12)")
    print(f"  start-up and plan {plan:.2f} s (to reach: 1.5); moving / cp -r: {(own - plan) / copy:.1f} (to reach: 3)")
    assert differences([(tmp_path / "upstream", tmp_path / "ours0")]) == {str(tmp_path / "ours0"): []}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fingerprint_beside_dcp_save(device: str, tmp_path: Path) -> None:
    """A model of 256 MiB with Adam's states: the fingerprint of all of it, and a save to a local disk."""
    model: Any = torch.nn.Linear(1 << 13, 1 << 13, bias=False, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1 << 13, device=device)).sum().backward()
    optimizer.step()

    def save() -> None:
        shutil.rmtree(tmp_path)
        dcp.save(dict(zip("mo", get_state_dict(model, optimizer), strict=True)), checkpoint_id=tmp_path)

    *_, share = ratio(lambda: fingerprint.of_training(model, optimizer), save)
    print(f"\n{device}: fingerprint in {share:.1%} of the time of dcp.save (figure to reach: 5 %)")
