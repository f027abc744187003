"""resume from a `checkpoint.writer` checkpoint, ZeRO-3"""

import os

from trainers import deepspeed_training as dt

if __name__ == "__main__":
    os.environ.update(CROSS_SIZE="1", CROSS_RANK="0")  # as set by the launcher: number of nodes, node rank
    dt.show_resume("stage3_writer-1", raises="UnpicklingError: Weights only load failed")
