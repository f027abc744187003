"""Checkpoints of mixtures of experts: DeepSpeed's AutoEP, and its classic `deepspeed.moe` layers."""

import functools
from pathlib import Path

import pytest

import shared
from test_audit_coverage import experts
from universal import ours
from upstream import run, tree

NEWEST = "0.19.8"


@functools.cache
def autoep(stage: int) -> Path:
    """Of a real training: two layers of four experts, on two expert-parallel ranks of four."""
    release = tree("deepspeed", NEWEST)
    out = shared.once(f"autoep-{stage}", lambda out: run("autoep_training", out, str(stage), tree=release))
    return out / "global_step3"


def check_refused(folder: Path, out: Path, *expected: str, version: str = NEWEST) -> None:
    """By one line, before a byte is written."""
    done = ours(folder, out / "universal", version=version, check=False)
    assert done.returncode == 2, done.stdout
    assert all(text in done.stderr for text in expected), done.stderr
    assert done.stderr.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize("stage", [1, 2])
def test_the_classic_kind_is_refused_and_no_converter_named_that_dies_of_it(stage: int, tmp_path: Path) -> None:
    check_refused(experts(stage), tmp_path / "out", "layer_0_expert_0_mp_rank_00", "DeepSpeed's own converter dies")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_autoep_is_refused(stage: int, tmp_path: Path) -> None:
    check_refused(
        autoep(stage), tmp_path / "out", "(ds_autoep_layers)", "python -m deepspeed.checkpoint.ds_to_universal"
    )
