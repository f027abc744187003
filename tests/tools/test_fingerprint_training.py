"""The state of a real megatron.training run besides its optimizer is recorded, and verified after a load."""

from pathlib import Path

import pytest

from upstream import newest, newest_affected, once, run, tree

NEWEST = newest("megatron-core")
BEFORE_EXPERTS = newest_affected("expert_rng")[1]
ON = {"CKPT_PATCHES_FINGERPRINT": "1"}


def program(what: str, folder: Path, *options: object, version: str = NEWEST, **env: str) -> str:
    """The program's log and output."""
    done = run(
        "run_proof",
        what,
        folder,
        *map(str, options),
        tree=tree("megatron-core", version),
        delivery="hook",
        env={**ON, **env},
    )
    return f"{done.stderr}\n{done.stdout}"


def saved(*options: object, version: str = NEWEST) -> Path:
    def save(folder: Path) -> None:
        assert '{"error": ""}' in program("save", folder, *options, version=version)

    return once(f"run-proof-{version}-{''.join(map(str, options))}", save)


@pytest.mark.parametrize(
    "version", [NEWEST, *(pytest.param(v, marks=pytest.mark.slow) for v in ("0.18.2", BEFORE_EXPERTS))]
)
def test_a_resume_is_verified_with_its_scheduler_and_position(version: str) -> None:
    said = program("load", saved(version=version), version=version)
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
