"""zero3_universal_save: a ZeRO-3 run that has loaded a universal checkpoint saves the model states of all ranks."""

import json
import subprocess
from pathlib import Path
from typing import Any

from upstream import affected, run, shown, shown_on, tree, with_fix, without_fix
from zero3_resumes import continued, kept
from zero_checkpoints import PERMISSIVE, convert

RELEASES = shown_on("zero3_universal_save")[-1:]


@without_fix(RELEASES)
def test_what_is_saved_again_does_not_resume(version: str, delivery: str) -> None:
    assert "AssertionError: no model states of this rank in the checkpoint" in shown(__file__, version, delivery)


@with_fix(RELEASES)
def test_what_is_saved_again_resumes_bit_for_bit(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""


# Further cases

FIX = "zero3_universal_save"

AFFECTED = affected(FIX)
KIND, RANKS = "stage3", 4
TAG = "global_step4"


def permissive(delivery: str) -> dict[str, str]:
    return PERMISSIVE if delivery == "none" else {}


def resume(
    version: str, delivery: str, folder: Path, tag: str | Path, **keywords: Any
) -> subprocess.CompletedProcess[str]:
    arguments: tuple[str | Path, ...] = ("resume", folder, tag, KIND, "--ranks", str(RANKS), "--first", "4")
    on: dict[str, Any] = {"tree": tree("deepspeed", version), "delivery": delivery, "env": permissive(delivery)}
    return run("zero_training", *arguments, **on, **keywords)


def model_files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / TAG).glob("*_model_states.pt"))


@without_fix(AFFECTED)
def test_upstream_saves_all_model_states_as_those_of_rank_0(version: str, delivery: str, tmp_path: Path) -> None:
    """Upstream's checkpoint neither resumes nor converts."""
    folder = continued(version, KIND, RANKS, delivery)
    assert model_files(folder) == ["zero_pp_rank_0_mp_rank_00_model_states.pt"]
    died = resume(version, delivery, folder, TAG, check=False)
    assert died.returncode == 1
    assert "assert len(self.ckpt_list) > 0" in died.stderr  # ranks 1 to 3 find no file
    (error,) = convert(tmp_path / "converted", folder / TAG, version=version, delivery=delivery).values()
    assert "exceeds dimension size" in error


@with_fix(AFFECTED)
def test_what_is_saved_resumes_and_converts(version: str, delivery: str, tmp_path: Path) -> None:
    """The checkpoint resumes bit-equal, as an ordinary one and as a universal one."""
    folder = continued(version, KIND, RANKS, delivery)
    assert model_files(folder) == [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(RANKS)]
    assert json.loads(resume(version, delivery, folder, TAG).stdout.splitlines()[-1]) == kept(folder)
    converted = convert(tmp_path / "converted", folder / TAG, version=version, delivery=delivery)
    assert converted == {KIND: ""}
    universal = tmp_path / "converted" / KIND
    assert json.loads(resume(version, delivery, folder, universal).stdout.splitlines()[-1]) == kept(folder)


def test_the_run_that_saves_is_as_without_the_fix() -> None:
    """The saving run is unchanged: its load still reads the first file on every rank."""
    before, after = (continued("0.16.2", KIND, RANKS, delivery) for delivery in ("none", "hook"))
    assert kept(before) == kept(after)


# What the ranks run

CASE, RANKS = "stage3-1", 2


def save_again(rank: int, folder: Path) -> str:
    from trainers import deepspeed_training as dt

    dt.train_and_save(rank, folder, CASE, RANKS)
    dt.convert(folder)
    resumed = dt.engine_of(CASE, RANKS, universal=True, seed=1)
    dt.load(resumed, folder, dt.UNIVERSAL)
    dt.train(resumed, rank, RANKS, first=dt.STEPS)
    dt.save(resumed, folder / "again")
    saved = dt.snapshot(resumed)
    last = dt.engine_of(CASE, RANKS, universal=False, seed=2)
    try:
        dt.load(last, folder / "again", dt.TAG)
    except AssertionError as error:
        raise AssertionError("no model states of this rank in the checkpoint") from error
    different = dt.on_any_rank(dt.differences(dt.snapshot(last), saved))
    return f"{len(different)} states differ, and no error" if different else ""


def bug(folder: Path) -> str:
    from trainers import deepspeed_training as dt

    return str(dt.results(save_again, RANKS, folder)[0])
