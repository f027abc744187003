"""The state of a real megatron.training run besides its optimizer is recorded, and verified after a load."""

from pathlib import Path
from typing import Any

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
def test_a_resume_is_verified_with_its_scheduler_position_and_rng_states(version: str) -> None:
    said = program("load", saved(version=version), version=version)
    assert "resume verified: learning-rate scheduler\n" in said
    assert "resume verified: RNG states, data position\n" in said
    # The second of two data-parallel ranks had drawn other random numbers on the host.
    assert "not verified: RNG states of other data-parallel ranks: Megatron saves those of the first one" in said
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
    assert "FingerprintError: resume differs: 1 value besides the optimizer" in said
    assert line in said
    said = program("load", saved(), "--odd", odd, **without, CKPT_PATCHES_FINGERPRINT="warn")
    assert line in said
    assert '{"error": ""}' in said


def test_a_scheduler_that_is_saved_and_not_loaded_is_named() -> None:
    """As verl does by default: its first step after the load starts over (verl#7953)."""
    said = program("load", saved(), "--odd", "no_scheduler")
    assert '{"error": ""}' in said
    assert "learning-rate scheduler: the checkpoint has its state, and the run has not loaded it" in said


@pytest.mark.slow
def test_rng_states_of_experts_that_are_of_another_rank_are_an_error(tmp_path: Path) -> None:
    """Another rank's RNG states are an error: without the fix `expert_rng`, each rank loads the first one's."""
    options: tuple[Any, ...] = ("--ranks", 2, "--ep", 2)
    for skipped in ("", "expert_rng"):
        folder, env = tmp_path / (skipped or "fixed"), {"CKPT_PATCHES_SKIP": skipped}
        folder.mkdir()
        assert '{"error": ""}' in program("save", folder, *options, version=BEFORE_EXPERTS, **env)
        said = program("load", folder, *options, version=BEFORE_EXPERTS, **env)
        assert ("RNG states of rank 1: of experts" in said) == bool(skipped)
        assert ('{"error": ""}' in said) == (not skipped)


@pytest.mark.slow
def test_rng_states_that_are_not_loaded_are_not_verified() -> None:
    folder = saved("--ranks", 4, "--tp", 2)
    said = program("load", folder, "--ranks", 4, "--tp", 2, "--no-rng")
    assert "not verified: RNG states: they were not loaded: --no-load-rng" in said
    said = program("load", folder, "--ranks", 2, "--tp", 2)
    assert (
        "not verified: RNG states: saved in another layout, 4 ranks, TP 2, PP 1, CP 1, EP 1, ETP 2; now 2 ranks" in said
    )
    assert "resume verified: data position" in said
