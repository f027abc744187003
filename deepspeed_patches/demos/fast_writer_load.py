"""resume from a checkpoint of `checkpoint.writer`, ZeRO-3"""

import os

from ckpt_patches.demo import deepspeed_training as dt

if __name__ == "__main__":
    os.environ.update(CROSS_SIZE="1", CROSS_RANK="0")  # as the launcher: nodes, and the number of this one
    dt.show_resume("stage3_writer-1", raises="UnpicklingError: Weights only load failed")
