"""With each fix of megatron-core switched off, the damage of its bug to a state is detected, or the run fails.

Only the record of the save detects it: the programs are those that show the bugs. This file and
docs/guides/fingerprint.md name what is not detected.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from ckpt_patches.cli import command_line
from megatron_resumes import exact, resumes
from test_resume_param_groups import SAME
from upstream import all_releases, newest, newest_affected, newest_by_default, numbers, releases, run, tree

pytestmark = pytest.mark.slow

ON = {"CKPT_PATCHES_FINGERPRINT": "1"}
CAUGHT = "FingerprintError: resume differs: "


def without(*fixes: str) -> dict[str, str]:
    return {**ON, "CKPT_PATCHES_SKIP": ",".join(fixes)}


# These load the saved state, in some sharded formats, and step differently from the second step on: the loaded groups
# of the hybrid optimizer have a step, which it copies to its inner optimizers before each step.
NOT_CAUGHT = {f"hybrid-0.5-precision-aware{word}" for word in ("", "-overlap")}


def optimizer_cases() -> list[Any]:
    """Release, inner optimizer, and the fix that is off."""
    return [
        pytest.param(*release.values, inner, fix, id=f"{release.id}-{inner}-{fix}")
        for release in newest_by_default(releases("megatron-core"))
        for inner, fix in (
            ("fused", "hybrid_offload_resume"),
            ("torch", "torch_adam_step"),
            *([("torch", "hybrid_offload_resume"), ("fused", "torch_adam_step")] if all_releases() else []),
        )
    ]


@pytest.mark.parametrize(("version", "inner", "fix"), optimizer_cases())
def test_no_optimizer_goes_on_with_a_state_that_is_not_the_saved_one(
    version: str, inner: str, fix: str, tmp_path: Path
) -> None:
    rows = resumes(version, inner, "hook", 2, tmp_path, env=without(fix)).rows
    recorded = [row for row in rows if row["format"] != "torch"]
    silent = [row for row in recorded if row["result"].startswith("differs") and not exact(row)]
    assert {row["optimizer"] for row in silent} <= (NOT_CAUGHT if fix == "hybrid_offload_resume" else set())
    assert all(row["result"].endswith("the loaded state is bit-equal") for row in silent)
    caught = [row for row in rows if row["result"].startswith(f"load died: {CAUGHT[:60]}")]
    assert caught or (inner, fix) == ("fused", "torch_adam_step")  # which all fail with KeyError


@pytest.mark.parametrize(
    "version",
    newest_by_default(releases("megatron-core", oldest="0.15.0", newest=newest_affected("fully_reshardable_shift")[1])),
)
def test_a_shifted_save(version: str, tmp_path: Path) -> None:
    root = tree("megatron-core", version)
    off = without("fully_reshardable_shift", "fully_reshardable_restore")
    run("shifted_saving", tmp_path, tree=root, delivery="hook", env=off)
    load = ("--load", tmp_path / "shifted")
    said = run("shifted_saving", tmp_path, *load, tree=root, delivery="hook", env=off, check=False).stderr
    assert CAUGHT in said
    assert command_line.main(["fingerprint", str(tmp_path / "shifted")]) == 1


DAMAGED = [
    ("0.12.0", "race", ["zarr_create_synchronizer"], "other values"),
    ("0.14.0", "race", ["zarr_create_synchronizer"], "other values"),
    ("0.16.1", "step", ["async_save_staging"], "other values"),
    (newest("megatron-core"), "step", ["async_save_staging"], "other values"),
]


@pytest.mark.parametrize(("release", "kind", "fixes", "looks"), DAMAGED)
def test_a_save_that_was_damaged_while_it_was_written(
    release: str, kind: str, fixes: list[str], looks: str, tmp_path: Path
) -> None:
    done = saved_and_loaded(release, kind, fixes, tmp_path / "damaged")
    assert CAUGHT in done.stderr
    assert looks in done.stderr
    assert command_line.main(["fingerprint", str(tmp_path / "damaged" / "out")]) == 1
    assert "resume verified: " in saved_and_loaded(release, kind, [], tmp_path / "whole").stderr


def saved_and_loaded(release: str, kind: str, fixes: list[str], folder: Path) -> CompletedProcess[str]:
    folder.mkdir()
    root = tree("megatron-core", release)
    run("damaged_saving", folder / "out", kind, tree=root, delivery="hook", env=without(*fixes))
    load, env = f"load-{kind}", without(*fixes)
    return run("damaged_saving", folder / "out", load, tree=root, delivery="hook", env=env, check=False)


GROUPS = [
    ("0.12.0", "plain", ["--stages"], ["stage1.b.weight: weight_decay 0.0, saved as 0.1"]),
    ("0.18.2", "mup", [], ["stage0.a.weight: eps 2.5e-09, saved as 1e-08"]),
    # Only one parameter's rate differs: a schedule may change it, so it is a warning, not an error.
    ("0.18.2", "decoupled", [], ["WARNING: resume verified: ", "rate: 9.756", "when saved: 1 parameters"]),
]


@pytest.mark.parametrize(("release", "name", "options", "said"), GROUPS)
def test_a_group_with_the_settings_of_another_one(
    release: str, name: str, options: Sequence[str], said: Sequence[str], tmp_path: Path
) -> None:
    saved, loaded = SAME[name]
    runs = [{"do": "save", "name": name, **saved}, {"do": "load", "name": name, **loaded}]
    format_ = "fully_reshardable" if numbers(release) >= (0, 15) else "fully_sharded_model_space"
    arguments = ("--format", format_, *options)

    def output(env: dict[str, str]) -> str:
        folder = tmp_path / env.get("CKPT_PATCHES_SKIP", "all")
        folder.mkdir()
        root = tree("megatron-core", release)
        done = run("param_groups", folder, *map(json.dumps, runs), *arguments, tree=root, delivery="hook", env=env)
        return done.stdout + done.stderr

    without_it = output(without("resume_param_groups"))
    assert [part for part in said if part not in without_it] == []
    assert "INFO: resume verified: " in output(ON)
