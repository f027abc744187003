"""torch_load_weights_only: DeepSpeed and its own checkpoints, with a torch that checks their classes."""

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import edits
from ckpt_patches.engine.plan import Outcome
from ckpt_patches.engine.source import Source
from upstream import (
    DELIVERIES,
    ZERO,
    all_releases,
    environment_for,
    newest,
    once,
    releases,
    run,
    run_json,
    shown,
    tree,
    with_and_without_fix,
    with_fix,
    without_fix,
)
from zero_checkpoints import PERMISSIVE, converted

FIX = "torch_load_weights_only"

NEWEST = "0.15.4"
AFFECTED = releases("deepspeed", newest=NEWEST)
if not all_releases():
    AFFECTED.append(pytest.param(NEWEST, id=NEWEST))
KINDS = ("stage1", "stage2", "stage3", "stage1_fp16", "stage2_fp16", "stage3_fp16")


@without_fix(AFFECTED[-1:])
def test_a_checkpoint_of_its_own_does_not_load(version: str, delivery: str) -> None:
    assert "UnpicklingError: Weights only load failed" in shown(__file__, version, delivery)


@with_fix(AFFECTED[-1:])
def test_a_resume_goes_on_bit_for_bit(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


@cache
def written(version: str, delivery: str = "none") -> Path:
    """Checkpoints of real trainings on 2 ranks, by kind, with the trainings' states at the save and at the end."""

    def train(folder: Path) -> None:
        run(
            "zero_training", "write", folder, *KINDS, "--ranks", "2", tree=tree("deepspeed", version), delivery=delivery
        )

    return once(f"own-files-{version}-{delivery}", train)


@with_and_without_fix(AFFECTED)
def test_reads_its_own_files(version: str, delivery: str, tmp_path: Path) -> None:
    """Files resume, convert and resume, and merge to fp32: all bit-equal to the uninterrupted training."""
    arguments: tuple[str | Path, ...] = (written(version), tmp_path, *KINDS, "--universal", *KINDS)
    found = run_json("own_files", *arguments, tree=tree("deepspeed", version), delivery=delivery)
    assert found.pop("allow list") == {"changed": ""}
    if delivery != "none":
        steps = ("load", "convert", "load converted", "fp32 weights")
        assert found == dict.fromkeys(steps, dict.fromkeys(KINDS, ""))
        return
    assert found.pop("load converted") == {}  # there is nothing to load
    for step, outcomes in found.items():
        for kind, error in outcomes.items():
            assert error.startswith("UnpicklingError: Weights only load failed."), (step, kind)
            assert "GLOBAL deepspeed." in error, (step, kind)


@pytest.mark.slow
def test_converts_to_the_same_files(tmp_path: Path) -> None:
    """The output equals that without this fix, with torch set to accept every class."""
    sources = [written(NEWEST) / kind / "global_step2" for kind in KINDS]
    for name, env in (("without", {**PERMISSIVE, "CKPT_PATCHES_SKIP": FIX}), ("with", {})):
        arguments: tuple[str | Path, ...] = (*sources, "--output", tmp_path / name)
        outcome = run_json("convert", *arguments, tree=tree("deepspeed", NEWEST), delivery="hook", env=env)
        assert outcome == dict.fromkeys(KINDS, "")
    for kind in KINDS:
        one, other = converted(tmp_path / "without" / kind), converted(tmp_path / "with" / kind)
        assert one.keys() == other.keys()
        assert all(one[name][key].equal(other[name][key]) for name in one for key in one[name])


# zero_to_fp32.py is also a program.

SCRIPT = "zero_to_fp32.py"


def check_fp32(output: Path, folder: Path) -> None:
    found, expected = torch.load(output / "pytorch_model.bin"), torch.load(folder / "truth.pt")
    assert all(found[name].equal(states["fp32"]) for name, states in expected.items())


@pytest.mark.slow
def test_zero_to_fp32_as_a_module(tmp_path: Path) -> None:
    """`python -m` uses the hook and writes the right weights."""
    folder = written(NEWEST) / "stage2"
    command = [sys.executable, "-m", "deepspeed.utils.zero_to_fp32", str(folder), str(tmp_path)]
    subprocess.run(command, env=environment_for(tree("deepspeed", NEWEST), "hook"), check=True)
    check_fp32(tmp_path, folder)


@pytest.mark.parametrize("reader", [NEWEST, newest("deepspeed")])
def test_the_copied_script_needs_no_patched_deepspeed(reader: str, tmp_path: Path) -> None:
    """The script works with upstream's package: DeepSpeed copies it into the folder, which outlives the install."""
    folder = written(NEWEST, "in place") / "stage2"
    run(folder / SCRIPT, folder, tmp_path, tree=tree("deepspeed", reader), imports=ZERO)
    check_fp32(tmp_path, folder)


def test_the_copied_script_of_upstream_dies(tmp_path: Path) -> None:
    """The copied script fails with the hook, too: DeepSpeed copies the file on disk, which is unchanged."""
    folder = written(NEWEST) / "stage2"
    root = tree("deepspeed", NEWEST)
    on: dict[str, Any] = {"tree": root, "delivery": "hook", "imports": ZERO}
    done = run(folder / SCRIPT, folder, tmp_path, **on, check=False)
    assert "GLOBAL deepspeed." in done.stderr


# Files with other classes


def foreign(tmp_path: Path, delivery: str, **keywords: Any) -> dict[str, Any]:
    arguments = (written(NEWEST) / "stage1", tmp_path)
    found = run_json("foreign_files", *arguments, tree=tree("deepspeed", NEWEST), delivery=delivery, **keywords)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_other_classes_are_refused(delivery: str, tmp_path: Path) -> None:
    found = foreign(tmp_path, delivery)
    assert found["plain"] == found["nebula"] == ""

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


# The edits themselves


@pytest.mark.parametrize("version", AFFECTED)
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


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("runtime.checkpoint_engine.torch_checkpoint_engine", "torch.load(path,", "torch.load(path, mmap=True,"),
        ("checkpoint.zero_checkpoint", "torch.load(", "self.reader.load("),
        ("checkpoint.ds_to_universal", "torch.load(", "self.reader.load("),
        ("checkpoint.universal_checkpoint", "torch.load(ckpt_file)", "torch.load(ckpt_file, 'cpu')"),
        ("utils.zero_to_fp32", "torch.load(f,", "torch.load(f, pickle_module=pickle,"),
    ],
)
def test_unknown_code_is_left_alone(copy: Path, module: str, old: str, new: str) -> None:
    """All files are edited or none."""
    reason = edits.check_left_alone(copy, FIX, f"deepspeed.{module}", old, new)
    assert f"{module.rpartition('.')[2]}.py: expected" in reason


# What the ranks run


def bug(folder: Path) -> str:
    from trainers import deepspeed_training as dt

    return dt.resumed("stage1-2", folder)
