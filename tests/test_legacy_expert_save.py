"""legacy_expert_save: existing checkpoints, and unknown code."""

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import edits
from upstream import newest_affected, run, run_lines, tree

FIX = "legacy_expert_save"
NEWEST = newest_affected(FIX)[1]
MODULE = "megatron.training.checkpointing"
FILE = "iter_0000001/mp_rank_00/model_optim_rng.pt"


def line(delivery: str, what: str, folder: Path, *options: object) -> dict[str, Any]:
    upstream = tree("megatron-core", NEWEST)
    (found,) = run_lines(FIX, what, folder, *map(str, options), tree=upstream, delivery=delivery)
    return found


@pytest.mark.parametrize("experts", [6, 0])
def test_a_checkpoint_with_files_that_ranks_wrote_over_is_refused(tmp_path: Path, experts: int) -> None:
    """With ETP 2 and TP 1 saved, a checkpoint with experts is refused: their two parts share one file."""
    saved = line("none", "save", tmp_path, "--experts", experts, "--saved-etp", 2)
    assert saved == {"errors": ["", ""], "right": [True, True], "files": [FILE]}
    assert line("none", "load", tmp_path)["right"] == [True, True]  # without a check of the parts
    loaded = line("hook", "load", tmp_path)
    assert loaded["right"] == [not experts] * 2
    for error in loaded["errors"] if experts else ():
        assert "expected a file for each part of the experts, found 1 files for 2 parts" in error
        assert "(TP 1, EP 1, ETP 2)" in error


def test_a_save_that_would_write_over_them_is_refused_before_it_writes(tmp_path: Path) -> None:
    refused = line("hook", "save", tmp_path, "--etp", 2)
    assert ["Save with --ckpt-format torch_dist." in error for error in refused["errors"]] == [True, True]
    assert refused["files"] == []


@pytest.mark.long
def test_a_file_is_of_its_own_tensor_and_expert_parallel_rank(tmp_path: Path) -> None:
    options = ("--ranks", 6, "--tp", 2, "--ep", 3)
    assert len(line("none", "save", tmp_path / "none", *options)["files"]) == 3
    assert len(line("hook", "save", tmp_path / "hook", *options)["files"]) == 6
    for delivery in ("none", "hook"):  # such a checkpoint needs no fix to be loaded
        assert line(delivery, "load", tmp_path / "hook", *options)["right"] == [True] * 6


@pytest.mark.parametrize("version", [NEWEST, pytest.param("0.17.1", marks=pytest.mark.slow)])
def test_context_parallel_ranks_have_files_of_their_own_of_the_layer_wise_optimizer(
    version: str, tmp_path: Path
) -> None:
    upstream = tree("megatron-core", version)

    def resume(delivery: str, *options: str, check: bool = True) -> CompletedProcess[str]:
        folder = tmp_path / f"{delivery}{len(options)}"
        folder.mkdir()
        return run("layer_wise_torch", folder, *options, tree=upstream, delivery=delivery, check=check)

    def found(*options: str) -> Any:
        return json.loads(resume(*options).stdout.strip().splitlines()[-1])

    both = [f"layer_wise_optimizer_{rank}.pt" for rank in (0, 1)]
    without = found("none")
    assert without["files"] == both[:1]
    assert any(without["wrong"]) or any(
        without["errors"]
    )  # states of the other rank, or a file that both wrote at once
    assert found("hook") == {"errors": ["", ""], "files": both, "wrong": [0, 0]}
    assert "layer_wise_optimizer_1.pt" in resume("hook", "--lost", check=False).stderr
    for delivery in ("none", "hook"):  # without context parallelism the names are the same
        assert found(delivery, "--cp", "1") == {"errors": ["", ""], "files": both, "wrong": [0, 0]}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        or dp_rank == 0\n", "        or dp_rank <= 0\n"),
        (
            "    checkpoint_name = get_checkpoint_name(\n        save_dir,",
            "    checkpoint_name = str(\n        save_dir,",
        ),
        ("        rank0=False,\n", "        rank0=bool(),\n"),
    ],
)
def test_code_of_another_shape_is_left_alone(tmp_path: Path, old: str, new: str) -> None:
    copy = edits.copy_of(tree("megatron-core", NEWEST), FIX, tmp_path)
    edits.check_left_alone(copy, FIX, MODULE, old, new)
