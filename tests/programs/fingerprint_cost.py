"""Save and load a linear layer with the real megatron-core on a CPU rank repeatedly; print the seconds of each.

    fingerprint_cost.py OUT [--hidden 2048] [--saves 5]

Prints JSON: the seconds of each save and of each load, the bytes of the optimizer's state, and the imported modules of
ckpt_patches.fingerprint.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ckpt_patches.demo import megatron_training as mt
from program_arguments import parsed


def main() -> None:
    mt.spawn(worker, 1, parsed({"out": Path}, hidden=2048, saves=5))


def worker(rank: int, options: argparse.Namespace) -> None:
    def network(config: Any, dtype: torch.dtype, native_fp32: bool) -> Any:
        return mt.tiny_model(config, dtype, native_fp32, hidden=options.hidden, out=options.hidden)

    mt.use_inner_optimizer("fused")
    model, optimizer = mt.build(make_model=network)
    mt.step(model, optimizer, 0)
    saves, loads = [], []
    for number in range(options.saves):
        folder = options.out / str(number)
        saves.append(seconds(lambda folder=folder: mt.save("fully_reshardable", model, optimizer, folder)))
        loads.append(seconds(lambda folder=folder: mt.load("fully_reshardable", model, optimizer, folder)))
        shutil.rmtree(folder)
    state = mt.inner(optimizer).optimizer.state.values()
    nbytes = sum(3 * own["exp_avg"].nbytes for own in state)
    ours = sorted(name for name in sys.modules if name.startswith("ckpt_patches.fingerprint"))
    print(json.dumps({"saves": saves, "loads": loads, "bytes": nbytes, "modules": ours}))


def seconds(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
