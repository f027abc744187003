"""Save a tiny model with the real DeepSpeed, as torchrun's process on one of several hosts.

Each rank waits five seconds before it writes a file, and OUT/begun.RANK is there when it has come to that.

    saving_zero_on_hosts.py OUT KIND
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch

from ckpt_patches.demo import deepspeed_training as zt


def main() -> None:
    out, kind = Path(sys.argv[1]), sys.argv[2]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    zt.prepare()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    run = zt.engine(kind, ranks, universal=False)
    zt.train(run, rank, ranks, first=0)
    write_slowly(run.checkpoint_engine, out / f"begun.{rank}")
    run.save_checkpoint(str(out), tag=zt.TAG)
    torch.distributed.barrier()
    os._exit(0)  # Gloo and DeepSpeed leave threads behind


def write_slowly(engine: Any, sign: Path) -> None:
    save = engine.save

    def slow(*args: Any, **kwargs: Any) -> Any:
        sign.touch()
        time.sleep(5)
        return save(*args, **kwargs)

    engine.save = slow


if __name__ == "__main__":
    main()
