"""CKPT_PATCHES_FINGERPRINT: if off, nothing is computed or recorded; `warn` logs what is wrong and continues."""

from pathlib import Path
from typing import Any

import pytest
from megatron_patches.fingerprint_megatron import layer_wise_optimizer

from ckpt_patches.cli import command_line
from ckpt_patches.engine.source import Source
from test_chained_group_steps import stage
from trainers.lazy import mt
from upstream import checkpoint_formats, newest, newest_affected, once, run, run_json, tree

NEWEST = newest("megatron-core")
BEFORE_EXPERTS = newest_affected("expert_rng")[1]


def resumed(folder: Path, what: str, formats: str, version: str = NEWEST, **env: str) -> tuple[list[str], str]:
    """The rows of a save or a resume of a plain optimizer, and the log."""
    arguments = ("--formats", formats, "--only", what, "--resume-ranks", "2")
    on: dict[str, Any] = {"tree": tree("megatron-core", version), "delivery": "hook"}
    done = run("exact_resume", folder, *arguments, env=env, **on)
    return done.stdout.splitlines(), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("off", [{}, {"CKPT_PATCHES_FINGERPRINT": "0"}], ids=str)
def test_off_nothing_is_recorded_and_a_load_verifies_nothing(off: dict[str, str], tmp_path: Path) -> None:
    formats = checkpoint_formats(NEWEST)
    _, log = resumed(tmp_path, "save", ",".join(formats), **off)
    assert "ckpt_patches_fingerprint" not in log
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > len(formats)
    assert [file for file in files if b"ckpt_patches_fingerprint" in file.read_bytes()] == []
    rows, log = resumed(tmp_path, "resume", ",".join(formats), CKPT_PATCHES_FINGERPRINT="1")
    assert [row for row in rows if '"bit-equal"' not in row] == []
    assert log.count("resume not verified") == len(formats)
    assert "it has no fingerprint: it was saved without CKPT_PATCHES_FINGERPRINT" in log


@pytest.mark.slow
def test_a_run_without_it_loads_a_checkpoint_with_a_record(tmp_path: Path) -> None:
    """A run without this package loads it, too: the record is one more key of the common state."""
    formats = checkpoint_formats(NEWEST)
    resumed(tmp_path, "save", ",".join(formats), CKPT_PATCHES_FINGERPRINT="1")
    for off in ({}, {"CKPT_PATCHES": "off"}):
        rows, log = resumed(tmp_path, "resume", ",".join(formats), **off)
        assert len(rows) == len(formats)
        assert [row for row in rows if '"bit-equal"' not in row] == []
        assert "resume verified" not in log


@pytest.mark.slow
def test_a_layer_wise_optimizer_that_loads_as_any_chain_does_is_recorded() -> None:
    """As in commits on the way to 0.16.0."""
    file = "megatron/core/optimizer/layer_wise_optimizer.py"
    release = Source((tree("megatron-core", "0.16.0") / file).read_bytes(), file)
    release.remove(release.function("LayerWiseDistributedOptimizer.load_state_dict"))
    commit = Source(release.edited(), file)
    layer_wise_optimizer(commit)
    assert commit.edited().count(b"@run_megatron.") == 1


@pytest.mark.slow
def test_a_resume_goes_on_with_warn(tmp_path: Path) -> None:
    on: dict[str, Any] = {"tree": tree("megatron-core", NEWEST), "delivery": "hook"}
    folder = tmp_path / "out"
    bug = {"CKPT_PATCHES_SKIP": "async_save_staging"}
    run("damaged_saving", folder, "step", env={**bug, "CKPT_PATCHES_FINGERPRINT": "1"}, **on)
    done = run("damaged_saving", folder, "load-step", env={"CKPT_PATCHES_FINGERPRINT": "warn"}, **on)
    assert "WARNING: resume differs: " in done.stderr
    assert command_line.main(["fingerprint", str(folder)]) == 1


@pytest.mark.slow
def test_a_local_checkpoint_of_several_optimizers_loads(tmp_path: Path) -> None:
    """Its file has the note as None, one more entry than there are optimizers."""
    root, nvrx = tree("megatron-core", NEWEST), tree("nvidia-resiliency-ext", newest("nvidia-resiliency-ext"))
    on: dict[str, Any] = {"tree": root, "delivery": "hook", "path": [nvrx], "env": {"CKPT_PATCHES_FINGERPRINT": "1"}}
    found = run_json("proof", __file__, "goes_back", "2", "2", "--folder", tmp_path, **on)
    assert found == [True, True]


def goes_back(rank: int, folder: Path) -> bool:
    """Whether a pipeline stage has the moments of its local checkpoint after a load."""
    mt.use_inner_optimizer("fused")
    model, optimizer = mt.build(make_model=stage)
    mt.step(model, optimizer, 0)
    saved, checkpoint = moments(optimizer), mt.saved_locally("fully_reshardable", model, optimizer)
    mt.step(model, optimizer, 1)
    mt.load_local("fully_reshardable", model, optimizer, checkpoint)
    return moments(optimizer) == saved


def moments(optimizer: Any) -> list[Any]:
    return [own["exp_avg"].tolist() for one in optimizer.chained_optimizers for own in one.optimizer.state.values()]


# megatron.training: the state of a run besides its optimizer


def program(what: str, folder: Path, *options: str, version: str = NEWEST, **env: str) -> str:
    """The log and output of a run with fingerprints."""
    on: dict[str, Any] = {"tree": tree("megatron-core", version), "delivery": "hook"}
    done = run("run_proof", what, folder, *options, env={"CKPT_PATCHES_FINGERPRINT": "1", **env}, **on)
    return f"{done.stderr}\n{done.stdout}"


def saved(version: str = NEWEST) -> Path:
    def save(folder: Path) -> None:
        assert '{"error": ""}' in program("save", folder, version=version)

    return once(f"run-proof-{version}", save)


@pytest.mark.parametrize(
    "version", [NEWEST, *(pytest.param(v, marks=pytest.mark.slow) for v in ("0.18.2", BEFORE_EXPERTS))]
)
def test_a_resume_is_verified_with_its_scheduler_and_position(version: str) -> None:
    said = program("load", saved(version), version=version)
    assert "resume verified: learning-rate scheduler\n" in said
    assert "resume verified: data position\n" in said
    assert '{"error": ""}' in said


@pytest.mark.parametrize(
    ("odd", "line"),
    [
        ("scheduler", "learning-rate scheduler: num_steps 32, saved as 24"),
        ("position", "data position: consumed_train_samples 32, saved as 24"),
    ],
)
def test_what_a_load_leaves_otherwise_is_an_error(odd: str, line: str) -> None:
    without = {"CKPT_PATCHES_SKIP": "scheduler_steps"}  # the fix for loads into a scheduler that has stepped
    said = program("load", saved(), "--odd", odd, **without)
    assert "FingerprintError: resume differs: 1 settings; 0 states verified" in said
    assert line in said
    said = program("load", saved(), "--odd", odd, **without, CKPT_PATCHES_FINGERPRINT="warn")
    assert line in said
    assert '{"error": ""}' in said


def test_a_scheduler_that_is_saved_and_not_loaded_is_named() -> None:
    """As verl does by default: its first step after the load starts over (verl#7953)."""
    said = program("load", saved(), "--odd", "no_scheduler")
    assert '{"error": ""}' in said
    assert "learning-rate scheduler: the checkpoint has its state, and the run has not loaded it" in said
