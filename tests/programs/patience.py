"""Seconds to wait for an event that may not come, or for another rank: more on a slow machine."""

import os


def seconds(on_a_fast_machine: float) -> float:
    """The seconds, times the environment variable CKPT_PATCHES_TEST_PATIENCE."""
    return on_a_fast_machine * float(os.environ.get("CKPT_PATCHES_TEST_PATIENCE", "1"))
