"""Hundreds of checkpoints derived from a real one: with natural oddities, and with slices lost at random."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from ckpt_patches.audit.audit import DAMAGED, WHOLE, audit
from crafted_files import copied, found_in
from megatron_checkpoints import ZARR, written
from test_audit import chunk, state
from upstream import all_releases

CASES = 1000 if all_releases() else 100
MATRICES = ("module.up.weight", "module.down.weight")
KEYS = ("fp32_param", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(written(ZARR).whole[-1], tmp_path_factory.mktemp("whole"))


@pytest.fixture
def restored(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / whole.name))


# Oddities of undamaged checkpoints


def tiny_gradients(path: Path, choose: random.Random) -> None:
    """Make squares underflow to zero in fp32."""
    first = choose.randrange(500)
    chunk(path, state("exp_avg"))[first : first + 70] *= np.float32(1e-25)
    chunk(path, state("exp_avg_sq"))[first : first + 70] = 0


def negative_zeros(path: Path, choose: random.Random) -> None:
    chunk(path, state("exp_avg", "module.down.weight"))[choose.randrange(100) :][:300] = -0.0


def zero_initialized(path: Path, choose: random.Random) -> None:
    """Zero a bias and its main parameter, but not its moments."""
    for array, label in (("module.up.bias", "0"), (state("fp32_param", "module.up.bias"), "0")):
        file = path / array / label
        file.write_bytes(bytes(file.stat().st_size))


NATURAL = (tiny_gradients, negative_zeros, zero_initialized)  # others are in healthy_kinds.py


def test_what_whole_checkpoints_have_is_no_damage(restored: Path, whole: Path) -> None:
    for seed in range(CASES // 5):
        choose = random.Random(seed)
        changes = choose.sample(NATURAL, choose.randrange(1, 3))
        for make in changes:
            make(restored, choose)
        assert found_in(restored) == (WHOLE, set()), (seed, [make.__name__ for make in changes])
        restore(whole, restored)


def restore(whole: Path, to: Path) -> None:
    for file in whole.rglob("*"):
        if file.is_file() and ".sync" not in str(file):
            shutil.copyfile(file, to / file.relative_to(whole))


# Slices lost at random


def test_slices_lost_at_random_are_found_to_the_element(restored: Path, whole: Path) -> None:
    """The finding has the exact range of a lost slice that had no zeros."""
    for seed in range(CASES):
        choose = random.Random(seed)
        key, parameter = choose.choice(KEYS), choose.choice(MATRICES)
        data = chunk(restored, state(key, parameter))
        begin, end = sorted(choose.sample(range(len(data) + 1), 2))
        end = max(end, begin + 3) if begin + 3 <= len(data) else end  # shorter ones can be chance
        length = end - begin
        data[begin:end] = 0
        report = audit(restored)
        found = [(f.kind.name, f.array, f.begin, f.end) for f in report.findings if f.kind.severity != "note"]
        kind = "lost_master" if key == "fp32_param" else "lost_moment"
        if length >= 3:
            assert found == [(kind, state(key, parameter), begin, end)], (seed, found, begin, end)
            assert report.verdict == DAMAGED
        restore(whole, restored)
