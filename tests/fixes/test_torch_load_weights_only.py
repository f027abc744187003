"""torch_load_weights_only: DeepSpeed and its own checkpoints, with a torch that checks their classes."""

import argparse
import builtins
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import edits
from ckpt_patches.engine.plan import Outcome
from ckpt_patches.engine.source import Source
from test_zero_to_fp32_bf16 import by_the_script
from trainers.lazy import dt
from upstream import (
    DELIVERIES,
    affected,
    called,
    newest_affected,
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
    on: dict[str, Any] = {"version": NEWEST, "delivery": delivery, "folder": tmp_path, **keywords}
    found: dict[str, Any] = called(__file__, "read_foreign_files", **on)
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
    assert f"{path}, test_torch_load_weights_only.Settings." in unknown
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


@pytest.mark.parametrize("version", ["0.15.0", NEWEST])
@pytest.mark.parametrize(
    "repaired", ["checkpoint.zero_checkpoint", "runtime.checkpoint_engine.torch_checkpoint_engine"]
)
def test_calls_that_are_repaired_stay(repaired: str, version: str, tmp_path: Path) -> None:
    """If the engine has another fix, no file is edited: modules would import a missing function from it."""
    copy, module = edits.copy_of(tree("deepspeed", version), FIX, tmp_path), f"deepspeed.{repaired}"
    edits.rewrite(copy, module, "torch.load(", "torch.load(weights_only=False, f=")
    result, plan = edits.plan(copy, FIX)
    if repaired.startswith("checkpoint."):
        assert result.outcome is Outcome.APPLIES
        assert module not in plan.files
        assert "deepspeed.checkpoint.ds_to_universal" in plan.files
    else:
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
        if case in ("stage1-2", "stage3-1"):  # by the script in the checkpoint, without the fixes
            found[case]["merged alone"] = error_of(lambda own=own: merged(own, alone=True))
    assert set(torch.serialization.get_safe_globals()) == allowed
    return found


def error_of(call: Any) -> str:
    try:
        return str(call())
    except Exception as error:
        return str(error) if type(error).__name__ == "RankError" else f"{type(error).__name__}: {error}"


def merged(folder: Path, *, alone: bool = False) -> str:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    merge = by_the_script if alone else get_fp32_state_dict_from_zero_checkpoint
    weights = merge(str(folder))
    truth = torch.load(folder / dt.TRUTH)
    return ", ".join(name for name, states in truth.items() if not weights[name].equal(states["fp32"]))


def save(folder: Path) -> None:
    dt.results(dt.train_and_keep, RANKS, folder, CASES[0], RANKS)


# Files with objects that DeepSpeed does not write itself


class Settings:
    """A user's class."""

    depth = 3


class Attack:
    """An object that runs code when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return builtins.exec, (f"open({str(self.marker)!r}, 'w').close()",)


class RawMemory:
    """An object array whose addresses come from the file, if NumPy's arrays are allowed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return numpy.ndarray, ((1,), "O", b"A" * 8)


def attacked_copy(checkpoint: Path, to: Path, marker: Path) -> Path:
    """Copy a checkpoint, with an attack in the first rank's file; return that file."""
    shutil.copytree(checkpoint, to)
    path = min(to.glob("*/*optim_states.pt"))
    torch.save({**torch.load(path, weights_only=False), "x": Attack(marker)}, path)
    return path


def read(rank_file: Path) -> dict[str, str]:
    """The error of each reader of a checkpoint."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    tag = rank_file.parent
    readers: dict[str, Any] = {
        "engine": lambda: TorchCheckpointEngine().load(str(rank_file), map_location="cpu"),
        "converter": lambda: dt.convert_by_upstream(0, tag, tag.parent / "universal", 1),
        "fp32 weights": lambda: get_fp32_state_dict_from_zero_checkpoint(str(tag.parent), tag=tag.name),
    }
    return {name: raised(call) for name, call in readers.items()}


def raised(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def read_foreign_files(folder: Path) -> dict[str, Any]:
    """The error of each reader. `ran` is whether code inside a file was run."""
    from deepspeed.checkpoint import SubparamShape
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    engine, path, marker = TorchCheckpointEngine(), str(folder / "client.pt"), folder / "ran"
    plain = {  # includes the allowed classes that no test's training writes
        "sub_param_shape": SubparamShape(patterns=["query"], shape=((2, 1), 3), partition_dim=0),
        "args": argparse.Namespace(params_dtype=torch.half, lr=1e-4, data_path=["a", "b"], seed=None),
        "random_rng_state": random.getstate(),
        "torch_rng_state": torch.get_rng_state(),
    }
    # Megatron-DeepSpeed saves this, and DeepSpeed itself with curriculum learning.
    of_numpy = {"np_rng_state": numpy.random.get_state()}
    classes = [numpy.empty(0).__reduce__()[0], numpy.ndarray, numpy.dtype, type(numpy.dtype("uint32"))]

    def load(saved: object) -> str:
        torch.save(saved, path)
        return raised(lambda: engine.load(path))

    found: dict[str, Any] = {
        "plain": load(plain),
        "unknown classes": load({"settings": Settings(), "path": Path("x"), **plain}),
        "raw memory": load(RawMemory()),
        "numpy state": load(of_numpy),
    }
    torch.serialization.add_safe_globals([Settings, type(Path("x")), argparse.Namespace, *classes])
    allowed = set(torch.serialization.get_safe_globals())
    found["allowed by the user"] = load({"settings": Settings(), "path": Path("x"), **plain, **of_numpy})
    found["changed"] = len(set(torch.serialization.get_safe_globals()) ^ allowed)
    Path(path).write_bytes(b"no checkpoint")
    found["damaged"] = raised(lambda: engine.load(path))
    found["attack"] = read(attacked_copy(folder / "saved", folder / "attack", marker))
    return found | {"ran": marker.exists()}
