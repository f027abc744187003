"""The sums of whole rows by compiled code (rows.c), where the install found a C compiler: the same numbers, sooner."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

NAME = "_rows"  # of the library beside this file, as setup.py has it


def sums_of_rows(bits: npt.NDArray[np.uint32], factors: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64] | None:
    """What the words of each row come to, modulo 2^64; None where nothing is compiled.

    Args:
        bits: of 32-bit floats, [rows, 2 * words], without gaps.
        factors: of the words, [words].
    """
    function = _function()
    if function is None:
        return None
    sums = np.empty(len(bits), np.uint64)
    function(bits.ctypes.data, len(bits), len(factors), factors.ctypes.data, sums.ctypes.data)
    return sums


@functools.cache
def _function() -> Any:
    """None as well where a checkout's library is of another kind of machine."""
    for path in Path(__file__).parent.glob(f"{NAME}*.so"):
        try:
            function = ctypes.CDLL(str(path)).ckpt_patches_sums_of_rows
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
        function.restype = None
        return function
    return None
