"""The checksum of a zip's records is the same with ISA-L and with zlib."""

import importlib
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
