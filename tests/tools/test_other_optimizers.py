"""Lion, SGD, AMSGrad and Muon: conversion, universal loads, audit and fingerprint handle all their states."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_patches.audit.audit import DAMAGED, WHOLE
from ckpt_patches.convert import zero_fingerprints
from ckpt_patches.convert.convert import Options, convert
from ckpt_patches.errors import UserError
from ckpt_patches.fingerprint import contents
from ckpt_patches.fingerprint.files import opened
from ckpt_patches.formats import torch_file
from crafted_files import found_in
from universal import load, save
from upstream import newest, once, run, run_json, tree

pytestmark = pytest.mark.slow

NEWEST = newest("deepspeed")
FLAT = ["Lion-1", "SGD-2", "momentum-2", "AMSGrad-1", "Muon-1", "Muon-2"]  # stage 1 and 2
CASES = [*FLAT, "Lion-3", "SGD-3", "momentum-3", "AMSGrad-3", "Muon-3"]
STATES = {"Lion": {"exp_avg"}, "SGD": set(), "momentum": {"momentum_buffer"}, "AMSGrad": {"max_exp_avg_sq"}}


@functools.cache
def trained() -> tuple[Path, dict[str, Any]]:
    """The folder of a session's training runs, and their results by case."""

    def write(out: Path) -> None:
        out.mkdir()
        found = run_json("other_optimizers", out, *CASES, tree=tree("deepspeed", NEWEST), delivery="hook")
        (out / "results.json").write_text(json.dumps(found))

    folder = once("other-optimizers", write)
    return folder, json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_it_resumes_converts_and_loads_bit_for_bit(case: str) -> None:
    """Results equal the optimizers' memory, on the ranks that saved and on another number."""
    folder, found = trained()
    assert found[case] == {"not live": [], "loads": [[], []], "resumed": []}
    names = {path.stem for path in (folder / case / "universal/zero").glob("*/*.pt")}
    assert STATES.get(case.partition("-")[0], {"momentum_buffer", "exp_avg"}) <= names
    assert found_in(folder / case / "global_step2") == found_in(folder / case / "universal") == (WHOLE, set())


@pytest.mark.parametrize("case", CASES)
def test_fingerprints_of_both_formats_are_the_same(case: str) -> None:
    folder = trained()[0] / case
    of_zero = {one[:2]: one for one in zero_fingerprints.read(folder / "global_step2", trust=True)[0]}
    of_universal = {one[:2]: one for one in contents.of(opened(folder / "universal")).fingerprints}
    assert of_zero == of_universal
    assert STATES.get(case.partition("-")[0], set()) <= {state for _, state in of_zero}


@pytest.mark.parametrize("case", ["momentum-2", "AMSGrad-1", "Muon-1", "momentum-3", "Muon-3"])
def test_a_state_that_is_not_finite_is_damage(case: str, tmp_path: Path) -> None:
    """A NaN is damage in the ranks' files and in the universal checkpoint."""
    state = "max_exp_avg_sq" if case == "AMSGrad-1" else "momentum_buffer"
    folder = shutil.copytree(trained()[0] / case, tmp_path / case)

    path = next((folder / "global_step2").glob("*pp_rank_0*optim_states.pt"))
    optimizer = torch_file.read(path, trust=True).value["optimizer_state_dict"]
    base = optimizer["optimizer_state_dict" if case.endswith("3") else "base_optimizer_state"]
    tensor = base["state"][0][state]
    with path.open("r+b") as written:
        written.seek(tensor.offset)
        written.write(b"\xff" * 4)  # NaN in any floating-point dtype
    file = folder / "universal/zero/w1.weight" / f"{state}.pt"
    value = load(file)
    (value["param"] if isinstance(value, dict) else value).view(-1)[0] = float("nan")
    save(value, file)
    for kind in ("global_step2", "universal"):
        verdict, found = found_in(folder / kind)
        assert (verdict, "not_finite" in found) == (DAMAGED, True)


SAVE_MUON = """
import sys
from trainers import deepspeed_training as dt
from trainers import optimizers

def save(rank, folder):
    run = optimizers.engine("Muon", 2, 1)
    dt.train(run, rank, 2, first=0)
    run.save_checkpoint(folder, tag=dt.TAG)

if __name__ == "__main__":
    dt.results(save, 2, sys.argv[1])
"""


def test_momenta_that_are_not_the_same_on_two_ranks_are_refused(tmp_path: Path) -> None:
    """DeepSpeed 0.19.7 leaves a shared matrix's momentum zero on the second rank, which is refused."""
    program = tmp_path / "save_muon.py"
    program.write_text(SAVE_MUON)
    run(program, tmp_path, tree=tree("deepspeed", "0.19.7"))
    folder = tmp_path / "global_step2"
    with pytest.raises(UserError, match=r"w1\.weight/momentum_buffer\.pt: expected .* in .*rank_0_.* and .*rank_1_"):
        convert(folder, tmp_path / "universal", Options(workers=1))


@pytest.mark.parametrize(
    ("case", "file"),
    [
        ("Lion-1", "w1.weight/exp_avg.pt"),
        ("momentum-2", "*/momentum_buffer.pt"),  # implied by its settings
        ("Muon-1", "w1.weight/momentum_buffer.pt"),
        ("Muon-1", "*/exp_avg_sq.pt"),
        ("AMSGrad-1", "w1.weight/step.pt"),
    ],
)
def test_a_state_that_is_not_there_is_damage(case: str, file: str, tmp_path: Path) -> None:
    path = shutil.copytree(trained()[0] / case / "universal", tmp_path / "universal")
    for one in path.glob(f"zero/{file}"):
        one.unlink()
    verdict, found = found_in(path)
    assert (verdict, found <= {"missing_array", "missing_state"}) == (DAMAGED, True)


def test_a_resume_is_verified_with_the_states_that_the_optimizer_has(tmp_path: Path) -> None:
    """States are verified, except Muon's momentum at ZeRO 1 and 2, which covers full matrices."""
    on = {"CKPT_PATCHES_FINGERPRINT": "1"}
    done = run(
        "other_optimizers", tmp_path, "Lion-1", "Muon-1", tree=tree("deepspeed", NEWEST), delivery="hook", env=on
    )
    log = done.stdout + done.stderr
    assert log.count("resume verified: 14 states, settings, ") == 3
    assert log.count("momentum_buffer: it has no element for each of the parameter's") == 3 * 2  # two matrices
