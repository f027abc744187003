"""The fingerprint of a tensor depends on every bit and its position, and not on how the tensor is divided."""

import itertools
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ckpt_patches.fingerprint import live_state
from ckpt_patches.fingerprint.element_hash import MODULUS, ROW, Box, of_box, of_places, of_run, zeros

# A few values, so that equal ones occur, and those of 16-bit floats, whose low half is zero.
VALUES = st.one_of(st.sampled_from([0, 1, 0x3F800000, 0x80000000]), st.integers(0, 2**32 - 1))
TENSORS = arrays(np.uint32, st.integers(2, 200), elements=VALUES)
# Around the ends of rows, where the factor changes.
BEGINS = st.sampled_from([0, 1, 7, ROW - 100, ROW - 1, ROW, 3 * ROW - 5, 2**40 - 50])


def scrambled(state: int) -> int:
    """The SplitMix64 output for a 64-bit state."""
    z = (state + 0x9E3779B97F4A7C15) % MODULUS
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULUS
    return z ^ (z >> 31)


def mix(index: int, bits: int) -> int:
    """The contribution of one element by the formula."""
    row, column = divmod(index, ROW)
    factor = (scrambled(2 * row + 1) | 1) * (scrambled(column & ~1) | 1) * ((1 << 32) + 1 if column % 2 else 1)
    return factor * (bits + 1) % MODULUS


def long(seed: int, rows: float) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 2**32, int(rows * ROW), dtype=np.uint32)


@pytest.mark.parametrize(
    ("index", "bits", "expected"),
    [
        (0, 0, 0x2EE0C536C9C0F4EF),
        (1, 0, 0xF8A1BA25C9C0F4EF),
        (0, 0x3F800000, 0x45EC21F81240F4EF),
        (ROW, 0x3F800000, 0x621AE455E1AB2C03),
        (2**40 + 12345, 0xFFFFFFFF, 0xDC4D3F1900000000),
    ],
)
def test_what_one_element_adds(index: int, bits: int, expected: int) -> None:
    """One element adds the value in docs/guides/fingerprint.md's test vectors."""
    assert mix(index, bits) == expected


@given(bits=TENSORS, begin=BEGINS)
def test_a_run_is_the_sum_of_its_elements(bits: npt.NDArray[np.uint32], begin: int) -> None:
    expected = sum(mix(begin + number, value) for number, value in enumerate(bits.tolist())) % MODULUS
    assert of_run(bits, begin) == expected
    assert of_places(bits, np.arange(begin, begin + len(bits))) == expected


@given(
    seed=st.integers(0, 9), begin=BEGINS, rows=st.sampled_from([2, 2.5, 3]), cuts=st.lists(st.floats(0, 1), max_size=4)
)
def test_any_split_gives_the_same_sum(seed: int, begin: int, rows: float, cuts: list[float]) -> None:
    """Complete rows, which are taken two elements at a time, give the same sum in one piece and in many."""
    bits = long(seed, rows)
    ends = sorted({0, len(bits), *(int(cut * len(bits)) for cut in cuts)})
    parts = [of_run(bits[first:last], begin + first) for first, last in itertools.pairwise(ends)]
    whole = of_run(bits, begin)
    assert sum(parts) % MODULUS == whole
    assert of_places(bits[::-1], np.arange(begin + len(bits) - 1, begin - 1, -1)) == whole


@given(bits=TENSORS, begin=BEGINS, bit=st.integers(0, 31), data=st.data())
def test_one_flipped_bit_gives_another(bits: npt.NDArray[np.uint32], begin: int, bit: int, data: st.DataObject) -> None:
    flipped = bits.copy()
    flipped[data.draw(st.integers(0, len(bits) - 1))] ^= np.uint32(1 << bit)
    assert of_run(flipped, begin) != of_run(bits, begin)


@given(numel=st.integers(1, 200), begin=BEGINS)
def test_zeros_count(numel: int, begin: int) -> None:
    """Each zero changes the sum, so missing elements are not taken for zeros."""
    assert of_run(np.zeros(numel, np.uint32), begin) != of_run(np.zeros(numel - 1, np.uint32), begin)
    assert zeros(numel * 20) == of_run(np.zeros(numel * 20, np.uint32), 0)


# Arithmetic on devices: torch's, with the same results on the CPU


def as_tensor(bits: npt.NDArray[np.uint32]) -> torch.Tensor:
    return torch.from_numpy(bits.copy().view(np.int32))


@given(seed=st.integers(0, 9), begin=BEGINS, rows=st.sampled_from([2, 2.5, 3]), cut=st.integers(0, 5000))
def test_on_a_device_whole_rows_are_the_same(seed: int, begin: int, rows: float, cut: int) -> None:
    """Their sum is the same at any offset in memory."""
    bits = long(seed, rows)
    assert of_run(as_tensor(bits)[cut:], begin + cut) == of_run(bits[cut:], begin + cut)


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> live_state.Part:
    """A part of several blocks, for several threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(live_state, "BLOCK", 3000)
    values = as_tensor(long(1, 10.5)).view(torch.float32)
    return live_state.Part("weight", "master", Box((5,), (len(values),), (1 << 20,)), 0, values, True)


def value_of(part: live_state.Part) -> int:
    (found,) = live_state.sums([part]).values()
    return found.value


def test_threads_share_the_blocks_of_a_large_part(part: live_state.Part, monkeypatch: pytest.MonkeyPatch) -> None:
    used = set()

    def noted(bits: Any, first: int, box: Box) -> int:
        used.add(threading.get_ident())
        return of_box(bits, first, box)

    monkeypatch.setattr(live_state, "of_box", noted)
    assert value_of(part) == of_run(long(1, 10.5), 5)
    assert used
    assert threading.get_ident() not in used
