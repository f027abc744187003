"""The audit's quick test of a block passes only blocks in which the slow test finds nothing."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_patches.audit.judging import blocks
from ckpt_patches.formats import elements
from ckpt_patches.formats.checkpoint import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ODD = st.sampled_from([0.0, -0.0, 1e-40, -1e-40, 1e-30, 6e-8, 1e-5, np.inf, -np.inf, np.nan, 3e38, 70000.0, -1.0])
NUMBERS = st.one_of(ODD, st.floats(width=32), st.floats(-1, 1, width=32))


def rounded(master: "np.ndarray[tuple[int], np.dtype[np.float32]]", dtype: str) -> elements.Block:
    with np.errstate(over="ignore", invalid="ignore"):
        return master.astype(DTYPES[dtype]).view(np.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@given(values=st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_quick_and_slow_agree(dtype: str, values: list[tuple[float, float, float, float, bool]]) -> None:
    master, exp_avg, exp_avg_sq, other = (
        np.array(column, np.float32) for column in list(zip(*values, strict=True))[:4]
    )
    source = np.where([value[4] for value in values], other, master)  # some weights are another master's
    streams = {
        WEIGHT: (rounded(source.astype(np.float32), dtype), dtype),
        MASTER: (master.view(np.uint8), "float32"),
        EXP_AVG: (exp_avg.view(np.uint8), "float32"),
        EXP_AVG_SQ: (exp_avg_sq.view(np.uint8), "float32"),
    }
    if blocks.is_clean(streams):
        assert not blocks.codes(streams, len(values)).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rounded_master_agrees_and_every_other_one_not(dtype: str) -> None:
    """A million main parameters match their rounded weights, and no weights four units away."""
    master = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint64).astype(np.uint32).view(np.float32)
    weight = rounded(master, dtype)
    size = np.dtype(DTYPES[dtype]).itemsize
    finite = np.isfinite(weight.view(DTYPES[dtype]).astype(np.float32)) & np.isfinite(master)
    right = {WEIGHT: (weight, dtype), MASTER: (master.view(np.uint8), "float32")}
    assert not (blocks.codes(right, len(master)) & blocks.UNROUNDED)[finite].any()
    shifted = (weight.view({4: np.uint32, 2: np.uint16}[size]) + 4).view(np.uint8)
    wrong = {WEIGHT: (shifted, dtype), MASTER: (master.view(np.uint8), "float32")}
    still = np.isfinite(shifted.view(DTYPES[dtype]).astype(np.float32)) & finite & (master.view(np.uint32) != 0)
    assert (blocks.codes(wrong, len(master)) & blocks.UNROUNDED)[still].all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_tie_may_go_either_way(dtype: str) -> None:
    """A tie matches both adjacent weights: optimizers that store weight and remainder round half up."""
    step = {"bfloat16": 1 << 16, "float16": 1 << 13}[dtype]
    master = np.array([np.float32(1).view(np.uint32) + step // 2], np.uint32)
    for bits in (np.float32(1).view(np.uint32), np.float32(1).view(np.uint32) + step):
        weight = np.array([bits], np.uint32).view(np.float32).astype(DTYPES[dtype]).view(np.uint8)
        streams = {WEIGHT: (weight, dtype), MASTER: (master.view(np.uint8), "float32")}
        assert blocks.is_clean(streams)
        assert not blocks.codes(streams, 1).any()


def test_a_small_weight_in_fp16_is_not_taken_for_what_its_bits_would_be() -> None:
    """A small fp16 weight does not match 2^-15, whose bits are those of a zero moved to fp32's exponent."""
    for weight in (0.0, 2.0**-24, -(2.0**-20)):
        streams = {
            WEIGHT: (np.array([weight], np.float16).view(np.uint8), "float16"),
            MASTER: (np.array([2.0**-15], np.float32).view(np.uint8), "float32"),
        }
        assert not blocks.is_clean(streams)
        assert blocks.codes(streams, 1) & blocks.UNROUNDED


def test_the_quick_test_knows_the_small_weights_in_fp16() -> None:
    """The quick test passes small fp16 weights, which every block has; the slow test takes ten times as long."""
    master = np.linspace(2.0**-26, 2.0**-13, 1 << 16).astype(np.float32)
    for sign in (1, -1):
        streams = {
            WEIGHT: (rounded(sign * master, "float16"), "float16"),
            MASTER: ((sign * master).view(np.uint8), "float32"),
        }
        assert blocks.is_clean(streams)
