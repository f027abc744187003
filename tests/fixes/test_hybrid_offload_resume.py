"""hybrid_offload_resume: the real hybrid CPU-offload optimizer resumes bit for bit."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import edits
from ckpt_patches.audit.audit import UNKNOWN, audit
from trainers.lazy import mt
from upstream import affected, called, checkpoint_formats, newest_affected, run_lines, tree, with_fix, without_fix

FIX = "hybrid_offload_resume"
AFFECTED = affected(FIX)
NEWEST = newest_affected(FIX)[1]
HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
HALF = "hybrid-0.5-precision-aware"
OPTIMIZERS = ("hybrid-0.5", "hybrid-1.0-precision-aware", HALF)


def resumes(
    version: str,
    delivery: str,
    folder: Path,
    names: Sequence[str] = OPTIMIZERS,
    env: dict[str, str] | None = None,
    root: Path | None = None,
) -> dict[str, set[str]]:
    """The results of resumes in a release's oldest and newest format, by optimizer; `root` is a copy of the release."""
    formats = checkpoint_formats(version)
    rows = run_lines(
        "exact_resume",
        folder / "out",
        *("--optimizers", ",".join(names), "--formats", f"{formats[0]},{formats[-1]}"),
        *("--resume-ranks", "2"),
        tree=root or tree("megatron-core", version),
        delivery=delivery,
        env=env,
    )
    return {name: {row["result"] for row in rows if row["optimizer"] == name} for name in names}


@without_fix(AFFECTED)
def test_upstream_fails_or_trains_on_from_another_state(version: str, delivery: str, tmp_path: Path) -> None:
    found = resumes(version, delivery, tmp_path)
    assert all("died" in result for result in found["hybrid-0.5"])
    assert any(result.startswith("differs by 0.0") for result in found["hybrid-1.0-precision-aware"])
    assert found[HALF] != {"bit-equal"}


@with_fix(AFFECTED)
def test_a_resume_is_bit_equal(version: str, delivery: str, tmp_path: Path) -> None:
    assert resumes(version, delivery, tmp_path) == {name: {"bit-equal"} for name in OPTIMIZERS}


def test_moments_without_a_step_are_refused(tmp_path: Path) -> None:
    """A checkpoint that was saved without the fix, with nothing offloaded, is loaded with it."""
    called(__file__, "save", version=NEWEST, delivery="none", folder=tmp_path, layout=[1])
    (found,) = called(__file__, "load", version=NEWEST, delivery="hook", folder=tmp_path, layout=[1])
    assert found.startswith("expected the optimizer's step in the checkpoint, found moments that are not zeros")
    assert found.endswith("Load the weights alone (--no-load-optim).")
    report = audit(tmp_path / "checkpoint")
    assert (report.verdict, report.checkpoint.step) == (UNKNOWN, None)
    (finding,) = [finding for finding in report.findings if finding.kind.name == "unusual"]
    assert finding.detail.endswith(", and no step: a load counts from 0")


# What the rank runs

FORMAT = "fully_reshardable"


def build() -> Any:
    mt.use_inner_optimizer("fused")
    return mt.build(offload_fraction=0.0, precision_aware=True)


def save(rank: int, folder: Path) -> None:
    model, optimizer = build()
    for iteration in range(5):
        mt.step(model, optimizer, iteration)
    mt.save(FORMAT, model, optimizer, folder / "checkpoint")


def load(rank: int, folder: Path) -> str:
    model, optimizer = build()
    try:
        mt.load(FORMAT, model, optimizer, folder / "checkpoint")
    except RuntimeError as error:
        return str(error)
    return ""


# Megatron-LM skips parameters that are fp32 themselves since 86e928a97f (2026-08-10). Rewritten:
NATIVE_FP32_LEFT_OUT = """fp32_param = self.param_to_fp32_param.get(param)
            if fp32_param is None:
                continue"""


def leave_out_native_fp32(folder: Path) -> Path:
    """The newest release, with the state transfer as since that commit."""
    copy = folder / f"megatron-core-{NEWEST}"
    shutil.copytree(tree("megatron-core", NEWEST), copy, ignore=shutil.ignore_patterns("__pycache__"))
    loop = "for param, v in self.state.items():\n            "
    edits.rewrite(copy, HYBRID, f"{loop}fp32_param = self.param_to_fp32_param[param]", loop + NATIVE_FP32_LEFT_OUT)
    return copy


@pytest.mark.slow
def test_parameters_that_are_fp32_themselves_resume_where_the_hand_over_leaves_them_out(tmp_path: Path) -> None:
    """These parameters, which have no main parameter but a CPU clone if offloaded, resume bit-equal."""
    copy = leave_out_native_fp32(tmp_path)
    names = ("hybrid-1.0-precision-aware-fp32",)
    assert resumes(NEWEST, "hook", tmp_path / "fixed", names, root=copy) == {names[0]: {"bit-equal"}}
    plain = resumes(NEWEST, "none", tmp_path / "plain", names, root=copy)
    assert plain != {names[0]: {"bit-equal"}}
