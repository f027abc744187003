"""fast_writer_load: a ZeRO-3 checkpoint of a `checkpoint.writer` resumes."""

import os
from pathlib import Path

from trainers.lazy import dt
from upstream import proof

test_the_load_of_its_own_files_fails, test_a_resume_goes_on_bit_for_bit = proof(
    __file__, "UnpicklingError: Weights only load failed"
)


# What the ranks run


def bug(folder: Path) -> str:
    os.environ.update(CROSS_SIZE="1", CROSS_RANK="0")  # as set by the launcher: number of nodes, node rank
    return dt.resumed("stage3_writer-1", folder)
