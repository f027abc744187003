"""round_robin_links: links, conversions and loads of the real DeepSpeed with `round_robin_gradients`."""

import shutil
from pathlib import Path

import pytest
import torch

import universal
from upstream import affected, with_fix, without_fix
from zero_checkpoints import KEYS, convert
from zero_resumes import exact, resumed, trained

FIX = "round_robin_links"

AFFECTED = affected(FIX)
CASES = ("stage1_round_robin-2", "stage2_round_robin-2")
RANKS = (2, 3)
# Without these, older releases fail before they convert anything.
OTHERS = ("torch_load_weights_only", "universal_tensor_paddings")
TAG, UNIVERSAL = "global_step2", "universal"


def converted(version: str, delivery: str, saved: Path, out: Path, *fixes: str) -> list[Path]:
    """Copies of the case folders, each with the universal checkpoint from upstream's converter."""
    folders = [shutil.copytree(saved / case, out / case) for case in CASES]
    sources = [folder / TAG for folder in folders]
    outcome = convert(out / "converted", *sources, version=version, delivery=delivery, fixes=fixes)
    assert set(outcome.values()) == {""}, outcome
    for folder in folders:
        shutil.move(out / "converted" / folder.name, folder / UNIVERSAL)
    return folders


def wrong(folder: Path) -> int:
    """The number of states in which the universal checkpoint differs from the optimizers' memory."""
    truth = torch.load(folder / "truth.pt", weights_only=False)["saved"]
    names = [name.removesuffix(".fp32") for name in truth if name.endswith(".fp32")]
    assert len(names) == 7
    pairs = [
        (folder / UNIVERSAL / "zero" / name / f"{key}.pt", truth[f"{name}.{key}"]) for name in names for key in KEYS
    ]
    return sum(not universal.value_of(path).equal(expected) for path, expected in pairs)


@pytest.mark.parametrize("ranks", RANKS)
@without_fix(AFFECTED)
def test_upstream_converts_and_loads_the_data_of_other_parameters(
    version: str, delivery: str, ranks: int, tmp_path: Path
) -> None:
    """Upstream silently uses other parameters' data. Its own resume is right: it uses no addresses."""
    saved = trained(version, "none", *CASES, ranks=ranks)
    assert all(map(wrong, converted(version, "hook", saved, tmp_path, *OTHERS)))
    assert all(map(exact, resumed(version, delivery, *(saved / case for case in CASES), ranks=ranks)))


@pytest.mark.parametrize("ranks", RANKS)
@with_fix(AFFECTED)
def test_each_parameter_gets_its_own(version: str, delivery: str, ranks: int, tmp_path: Path) -> None:
    """Each parameter gets its own data: saved with the fix or without, converted, and loaded on 2 and on 3 ranks."""
    for written_by in (delivery, "none"):
        saved = trained(version, written_by, *CASES, ranks=ranks)
        folders = converted(version, delivery, saved, tmp_path / written_by)
        assert list(map(wrong, folders)) == [0, 0]
        for number in RANKS:
            for found in resumed(version, delivery, *folders, ranks=number, tag=UNIVERSAL):
                assert found["different"] == []
                assert number != ranks or exact(found)
