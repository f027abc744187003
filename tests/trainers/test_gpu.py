"""On a real GPU, without the stub, as the other tests do it on the CPU.

Several ranks share the GPU: NCCL treats them as ranks of different hosts and sends over sockets.
"""

from pathlib import Path
from typing import Any

import pytest

from ckpt_patches.audit.audit import WHOLE, audit
from registered import FIXES
from trainers.gpu import SWITCH
from upstream import REPOSITORY, newest, newest_affected, numbers, run, shown, tree

pytestmark = pytest.mark.gpu
NEWEST = newest("megatron-core")
ON_A_GPU = {SWITCH: "1"}


@pytest.mark.parametrize("form", ["dp_reshardable", "fully_reshardable"])
def test_a_checkpoint_of_a_gpu_is_whole(form: str, tmp_path: Path) -> None:
    """The verdict is WHOLE, though unwritten elements are reused memory."""
    options = ("--ranks=2", "--iterations=1,3", f"--format={form}", "--backend=torch_dist")
    run("megatron_saving", tmp_path, *options, tree=tree("megatron-core", NEWEST), delivery="none", env=ON_A_GPU)
    saved = sorted(tmp_path.glob("iter_*"))
    assert len(saved) == 2
    for folder in saved:
        report = audit(folder)
        assert report.verdict == WHOLE, report.findings


@pytest.mark.parametrize("odd", ["", "scheduler"])
def test_a_resume_is_verified_with_its_rng_states(odd: str, tmp_path: Path) -> None:
    env = {**ON_A_GPU, "CKPT_PATCHES_FINGERPRINT": "1"}
    release = tree("megatron-core", NEWEST)
    run("run_proof", "save", tmp_path, tree=release, delivery="hook", env=env)
    done = run("run_proof", "load", tmp_path, f"--odd={odd}", tree=release, delivery="hook", env=env)
    said = done.stderr + done.stdout
    assert ('{"error": ""}' in said) == (not odd), said[-4000:]
    assert ("resume verified: data position" in said) == (not odd), said[-4000:]


# Without spawn as the start method of the program, DeepSpeed 0.19.8's decoupled writer cannot use CUDA.
# The others save or load zarr, for which these releases need NumPy 1.
NOT_THERE = ("decoupled_last_save", "numpy2_product", "zarr_create_synchronizer")
# Older ones use the GPU at import, so that no rank can be forked, or do not import with torch 2.11.
OLDEST_DEEPSPEED = (0, 19, 6)


def proof(fix: str) -> str:
    return str(REPOSITORY / "tests" / "fixes" / f"test_{fix}.py")


def is_shown(fix: str) -> bool:
    package, version = newest_affected(fix)
    return (
        fix not in NOT_THERE
        and "def bug(folder" in Path(proof(fix)).read_text()
        and (package != "deepspeed" or numbers(version) >= OLDEST_DEEPSPEED)
    )


SHOWN = [fix for fix in FIXES if is_shown(fix)]


@pytest.mark.parametrize("fix", SHOWN)
def test_the_proof_of_a_fix(fix: str) -> None:
    """Of those whose proof finds in words what is wrong."""
    version = newest_affected(fix)[1]
    on: dict[str, Any] = {"imports": (), "env": {**ON_A_GPU, "DS_ACCELERATOR": "cuda"}}
    assert shown(proof(fix), version, "none", **on)
    assert shown(proof(fix), version, "hook", **on) == ""
