"""torch_load_weights_only: DeepSpeed and its own checkpoints, with a torch that checks their classes."""

from pathlib import Path
from typing import Any

import pytest
import torch

import edits
from ckpt_patches.engine.plan import Outcome
from ckpt_patches.engine.source import Source
from trainers.lazy import dt
from upstream import (
    DELIVERIES,
    affected,
    called,
    newest_affected,
    run_json,
    shown,
    tree,
    with_fix,
    without_fix,
)
from zero_checkpoints import PERMISSIVE

FIX = "torch_load_weights_only"
RELEASES = affected(FIX)
NEWEST = newest_affected(FIX)[1]
REFUSED = "UnpicklingError: Weights only load failed"


@without_fix(RELEASES)
def test_no_checkpoint_of_its_own_is_read(version: str, delivery: str) -> None:
    found = called(__file__, "of_each", version=version, delivery=delivery)
    assert {what for of_case in found.values() for what, error in of_case.items() if error.startswith(REFUSED)} == {
        *("resumed", "converted", "merged")
    }
    assert "" not in [error for of_case in found.values() for error in of_case.values()]


@with_fix(RELEASES)
def test_its_own_checkpoints_are_resumed_converted_and_merged_bit_for_bit(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# Files with other classes


def foreign(tmp_path: Path, delivery: str, **keywords: Any) -> dict[str, Any]:
    called(__file__, "save", version=NEWEST, delivery="none", folder=tmp_path / "saved")
    arguments = (tmp_path / "saved", tmp_path)
    found = run_json("foreign_files", *arguments, tree=tree("deepspeed", NEWEST), delivery=delivery, **keywords)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_other_classes_are_refused(delivery: str, tmp_path: Path) -> None:
    found = foreign(tmp_path, delivery)
    assert found["plain"] == ""

    unknown = found["unknown classes"]
    assert unknown.startswith(
        f"UnpicklingError: {tmp_path / 'client.pt'} holds classes that DeepSpeed does not allow by itself: "
    )
    path = f"{type(Path()).__module__}.PosixPath"  # another module in Python 3.13
    assert f"__main__.Settings, {path}." in unknown
    assert "torch.serialization.add_safe_globals" in unknown
    assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1" in unknown
    assert "numpy.dtype, numpy.ndarray." in found["numpy state"]
    assert found["allowed by the user"] == ""
    assert found["changed"] == 0  # also for a class that is in both lists, ours and the user's

    assert "by itself: numpy.ndarray." in found["raw memory"]
    assert all("by itself: builtins.exec." in error for error in found["attack"].values())
    assert found["ran"] is False
    assert found["damaged"].startswith("UnpicklingError: Weights only load failed.")


def test_the_attack_is_one_and_torchs_own_switch_is_obeyed(tmp_path: Path) -> None:
    """With torch's own switch the file is trusted: everything in it is loaded and run."""
    found = foreign(tmp_path, "hook", env=PERMISSIVE)
    assert found["unknown classes"] == ""
    assert set(found["attack"].values()) == {""}
    assert found["ran"] is True


@pytest.mark.parametrize("version", RELEASES)
def test_no_other_file_is_loaded(version: str) -> None:
    """Only inference code still calls torch.load by itself: it loads weights from others."""
    root = tree("deepspeed", version)
    _, plan = edits.plan(root, FIX)
    patched = {Path(file.path): file.patched for file in plan.files.values()}
    left = set()
    for path in (root / "deepspeed").rglob("*.py"):
        data = patched.get(path) or path.read_bytes()
        source = Source(data, str(path)) if b"torch.load" in data else None
        if source and len(source.all("torch.load")) > (2 if source.has_function("load_checkpoint_file") else 0):
            left.add(path.relative_to(root / "deepspeed").parts[0])
    assert left == {"inference", "module_inject"}


@pytest.fixture(params=["0.15.0", NEWEST])
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The edited files of a release, writable."""
    return edits.copy_of(tree("deepspeed", request.param), FIX, tmp_path)


def test_calls_that_are_repaired_stay(copy: Path) -> None:
    module = "deepspeed.checkpoint.zero_checkpoint"
    edits.rewrite(copy, module, "torch.load(state_file,", "torch.load(state_file, weights_only=False,")
    result, plan = edits.plan(copy, FIX)
    assert result.outcome is Outcome.APPLIES
    assert module not in plan.files
    assert "deepspeed.checkpoint.ds_to_universal" in plan.files


def test_where_the_engine_is_repaired_no_other_module_imports_from_it(copy: Path) -> None:
    """If the engine has another fix, no file is edited: modules would import a missing function."""
    engine = "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine"
    edits.rewrite(copy, engine, "torch.load(path,", "torch.load(path, weights_only=False,")
    result, plan = edits.plan(copy, FIX)
    assert (result.outcome, plan.files) == (Outcome.NO_MATCH, {})
    assert "a part of this fix is there already (define_for_all in deepspeed.runtime" in result.reason


# What the ranks run

CASES = ("stage1-2", "stage2-2", "stage3-1", "stage1_fp16-2", "stage2_fp16-2", "stage3_fp16-1")
RANKS = 2


def bug(folder: Path) -> str:
    found = of_each(folder).items()
    return "; ".join(f"{case} {what}: {wrong}" for case, each in found for what, wrong in each.items() if wrong)


def of_each(folder: Path) -> dict[str, dict[str, str]]:
    """By case, what differs after a resume, a conversion and a merge to fp32, or the error."""
    allowed = set(torch.serialization.get_safe_globals())
    found = {}
    for case in CASES:
        own = folder / case
        dt.results(dt.train_and_keep, RANKS, own, case, RANKS)
        found[case] = {
            "resumed": error_of(lambda case=case, own=own: dt.resumed(case, own / "resumed")),
            # Of ZeRO 3 upstream's converter writes padding, too.
            "converted": error_of(lambda case=case, own=own: dt.converted(own, handed_over=case.startswith("stage3"))),
            "merged": error_of(lambda own=own: merged(own)),
        }
    assert set(torch.serialization.get_safe_globals()) == allowed
    return found


def error_of(call: Any) -> str:
    try:
        return str(call())
    except Exception as error:
        return str(error) if type(error).__name__ == "RankError" else f"{type(error).__name__}: {error}"


def merged(folder: Path) -> str:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=dt.TAG)
    truth = torch.load(folder / dt.TRUTH)
    return ", ".join(name for name, states in truth.items() if not weights[name].equal(states["fp32"]))


def save(folder: Path) -> None:
    dt.results(dt.train_and_keep, RANKS, folder, CASES[0], RANKS)
