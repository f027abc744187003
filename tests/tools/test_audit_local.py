"""Local checkpoints of nvidia-resiliency-ext: a folder for each rank of a node, with a file for each iteration."""

import shutil
from pathlib import Path

import pytest
import torch

from ckpt_patches.audit.audit import DAMAGED, UNKNOWN, WHOLE, audit
from ckpt_patches.formats.files_reader import LOCAL
from crafted_files import copied, found_in, names
from every_checkpoint import in_torch_file, put
from upstream import newest, once, run, tree

FILE = "iter_0000010_1_local.pt"


def saved() -> Path:
    release = tree("nvidia-resiliency-ext", newest("nvidia-resiliency-ext"))
    return once("nvrx-local", lambda out: run("nvrx_local", out, tree=release)) / "session"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copied(saved(), tmp_path)


def test_a_sound_one_is_whole() -> None:
    report = audit(saved())
    assert (report.verdict, names(report), report.checkpoint.format) == (WHOLE, set(), LOCAL)
    assert (report.checkpoint.step, report.checkpoint.iteration) == (2, 10)
    assert audit(saved() / "1").verdict == WHOLE
    assert {file.name for file in (saved() / "1").iterdir()} == {FILE}


def test_a_file_is_missing_cut_or_of_an_earlier_iteration(copy: Path) -> None:
    file = copy / "1" / FILE
    data = file.read_bytes()
    file.write_bytes(data[:-100])
    assert found_in(copy) == (DAMAGED, {"bad_file"})
    file.rename(file.with_name("iter_0000005_1_local.pt")).write_bytes(data)
    assert found_in(copy) == (DAMAGED, {"missing_rank", "unusual"})
    file.write_bytes(data)
    assert found_in(copy) == (UNKNOWN, {"unusual"})
    shutil.copytree(copy / "1", copy / "3")
    (copy / "3" / FILE).rename(copy / "3" / FILE.replace("_1_", "_3_"))
    assert "missing_rank" in found_in(copy)[1]  # rank 2 of at least 4


def test_odd_elements_are_found(copy: Path) -> None:
    file = copy / "1" / FILE
    place = next(own for own in in_torch_file(file) if own.name.endswith("exp_avg_sq") and own.numel > 100)
    data = place.data()
    put(place, torch.tensor(float("nan")).numpy().tobytes(), 3)
    assert found_in(copy) == (DAMAGED, {"not_finite"})
    put(place, data)
    put(place, bytes(place.nbytes // 2))
    assert found_in(copy) == (DAMAGED, {"lost_moment"})
