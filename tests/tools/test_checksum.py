"""The checksum of a zip's records is the same with ISA-L and with zlib."""

import importlib
import itertools
import random
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib

from ckpt_patches.formats import checksum


@given(data=st.binary(), before=st.integers(0, 2**32 - 1))
def test_is_zlibs(data: bytes, before: int) -> None:
    assert checksum.crc32(data, before) == zlib.crc32(data, before)


def test_is_isals_where_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checksum.crc32 is isal_zlib.crc32
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)  # as if not installed
    monkeypatch.setitem(sys.modules, "ckpt_patches.formats.checksum", None)
    del sys.modules["ckpt_patches.formats.checksum"]
    assert importlib.import_module("ckpt_patches.formats.checksum").crc32 is zlib.crc32


@given(data=st.binary(min_size=1), cuts=st.lists(st.integers(0, 100)), order=st.randoms())
def test_what_parts_contribute_is_the_checksum_in_any_order(data: bytes, cuts: list[int], order: random.Random) -> None:
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    parts = [(data[begin:end], len(data) - end) for begin, end in itertools.pairwise(ends)]
    order.shuffle(parts)
    found = 0
    for part, after in parts:
        found ^= checksum.shifted(checksum.crc32(part), after)
    assert found == zlib.crc32(data)


@given(one=st.binary(), zeros=st.integers(0, 5000))
def test_zeros_of_any_number(one: bytes, zeros: int) -> None:
    assert checksum.of_zeros(zeros) == zlib.crc32(bytes(zeros))
    assert checksum.combined(zlib.crc32(one), zlib.crc32(bytes(zeros)), zeros) == zlib.crc32(one + bytes(zeros))
