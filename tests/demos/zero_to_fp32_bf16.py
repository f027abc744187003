"""zero_to_fp32 of BF16_Optimizer, here and in the checkpoint"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from trainers import cases, show
from trainers import deepspeed_training as dt

RANKS = (2, 3)
CASE = "bf16_optimizer-2"
BY_THE_SCRIPT = """
import runpy, sys, torch
script = runpy.run_path(sys.argv[1])
torch.save(script["get_fp32_state_dict_from_zero_checkpoint"](sys.argv[2]), sys.argv[3])
"""


def run(folder: Path) -> str:
    for ranks in cases(RANKS):
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


if __name__ == "__main__":
    dt.allow_pickles()
    show(run, "the masters, bit for bit, here and by the script")
