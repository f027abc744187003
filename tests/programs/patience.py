"""Seconds that a program waits for what never comes, or for another rank: more of them on a slow machine."""

import os


def seconds(on_a_fast_machine: float) -> float:
    """So many, times the environment variable CKPT_PATCHES_TEST_PATIENCE."""
    return on_a_fast_machine * float(os.environ.get("CKPT_PATCHES_TEST_PATIENCE", "1"))
