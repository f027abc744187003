"""zero_to_fp32_bf16: `zero_to_fp32` and its copy in the checkpoint read the main parameters of BF16_Optimizer."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from trainers.lazy import dt
from upstream import affected, releases, shown, with_fix, without_fix

RELEASES = affected("zero_to_fp32_bf16")
# In the releases between, such a run has no ZeRO, unless `bf16_wrapper_name` is active.
SHOWN_ALONE = [*releases("deepspeed", newest="0.17.5"), *releases("deepspeed", oldest="0.18.5")]


@without_fix(SHOWN_ALONE)
def test_they_cannot_be_read_or_are_others(version: str, delivery: str) -> None:
    found = shown(__file__, version, delivery)
    assert found.startswith("ValueError: ") or "parameters differ, and no error" in found


@with_fix(RELEASES)
def test_they_are_read_bit_for_bit(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# What the ranks run

RANKS = (2, 3)
CASE = "bf16_optimizer-2"
BY_THE_SCRIPT = """
import runpy, sys, torch
script = runpy.run_path(sys.argv[1])
torch.save(script["get_fp32_state_dict_from_zero_checkpoint"](sys.argv[2]), sys.argv[3])
"""


def bug(folder: Path) -> str:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    dt.allow_pickles()
    for ranks in RANKS:
        checkpoint = folder / str(ranks)
        dt.results(dt.train_and_keep, ranks, checkpoint, CASE, ranks)
        truth = torch.load(checkpoint / dt.TRUTH, map_location="cpu")
        masters = {name: states["fp32"] for name, states in truth.items()}
        for read in (get_fp32_state_dict_from_zero_checkpoint, by_the_script):
            try:
                found = read(str(checkpoint))
            except ValueError as error:
                return f"ValueError: {str(error).replace(f'{folder}/', '')}"
            if wrong := [name for name in masters if not found[name].equal(masters[name])]:
                return f"{len(wrong)} of {len(masters)} parameters differ, and no error"
    return ""


def by_the_script(checkpoint: str) -> Any:
    """Run the script in the checkpoint in a process without patches: it must work on its own."""
    script, output = os.path.join(checkpoint, "zero_to_fp32.py"), os.path.join(checkpoint, "weights.pt")
    command = [sys.executable, "-c", BY_THE_SCRIPT, script, checkpoint, output]
    done = subprocess.run(command, env={**os.environ, "CKPT_PATCHES": "off"}, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{script}: {done.stderr.strip().splitlines()[-1]}")
    return torch.load(output)
