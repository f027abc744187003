"""Save a training of the real megatron-core without the distributed optimizer, in torch_dist.

float16_saving.py OUT [--inner torch] [--native-fp32]
"""

import argparse
from pathlib import Path

from ckpt_patches.demo import megatron_training as mt
from program_arguments import parsed


def main() -> None:
    mt.results(save, 1, parsed({"out": Path}, inner="torch", native_fp32=False))


def save(rank: int, options: argparse.Namespace) -> None:
    mt.use_inner_optimizer(options.inner)
    model, optimizer = mt.build(native_fp32=options.native_fp32, settings={"use_distributed_optimizer": False})
    for iteration in range(3):
        mt.step(model, optimizer, iteration)
    mt.save("default", model, optimizer, options.out)


if __name__ == "__main__":
    main()
