"""The checksum of a zip's records is the same with ISA-L and with zlib, and is compared in a checkpoint's files."""

import importlib
import itertools
import random
import sys
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib

from ckpt_patches.audit.audit import DAMAGED, WHOLE
from ckpt_patches.formats import checksum
from crafted_files import found_in


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


# In files


def test_tensors_that_overlap_in_a_storage_are_checked(tmp_path: Path) -> None:
    """A batch and its labels, and two parts of a buffer; no piece begins where the one before ends."""
    tokens, buffer, path = torch.randint(0, 1000, (5000,)), torch.randn(5000), tmp_path / "global_step10"
    file = path / "mp_rank_00_model_states.pt"
    path.mkdir()
    value = {
        "module": {"w": torch.ones(4), "q": buffer[:4000], "k": buffer[1000:]},
        "optimizer": torch.optim.SGD([torch.ones(4)]).state_dict(),
        "batch": {"x": tokens[:-1], "y": tokens[1:]},
        "lr_scheduler": None,
        "ds_config": {},
        "global_steps": 10,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
    }
    torch.save(value, file)
    assert found_in(path) == (WHOLE, set())
    whole = file.read_bytes()
    for own in (tokens, buffer):
        data = own.numpy().tobytes()
        for at in (whole.index(data), whole.index(data) + len(data) // 2, whole.index(data) + len(data) - 1):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            assert found_in(path) == (DAMAGED, {"bad_file"})
