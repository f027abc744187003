"""What a fingerprint costs beside NumPy's sum of the same state, on one core. `make bench` prints."""

import statistics
import time
from collections.abc import Callable

import numpy as np

from ckpt_patches.fingerprint.mix import of_run

NUMEL = 1 << 26  # 256 MiB
PAIRS = 15


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def test_beside_reading_the_state_once() -> None:
    state = np.random.default_rng(0).standard_normal(NUMEL, np.float32)
    bits = state.view(np.uint32)
    of_run(bits[: 1 << 20], 0)  # makes the table
    pairs = [(seconds(state.sum), seconds(lambda: of_run(bits, 0))) for _ in range(PAIRS)]
    speed = statistics.median(one / other for one, other in pairs)
    rate = state.nbytes / statistics.median(other for _, other in pairs) / 1e9
    print(f"\nfingerprint: {speed:.2f} times the speed of NumPy's sum (figure to reach: 0.5); {rate:.1f} GB/s a core")
