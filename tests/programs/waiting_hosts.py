"""As torchrun's process on one of several hosts: the last rank takes SECONDS for a save, all others end long before.

waiting_hosts.py SECONDS
"""

import sys
import time

import torch.distributed as dist

from ckpt_patches.watch import lost_host


@lost_host.watched
def save(seconds: float) -> None:
    time.sleep(seconds)


def main() -> None:
    dist.init_process_group("gloo")
    is_last = dist.get_rank() == dist.get_world_size() - 1
    dist.barrier()
    save(float(sys.argv[1]) if is_last else 0.1)
    print(f"rank {dist.get_rank()} has saved", flush=True)


if __name__ == "__main__":
    main()
