"""universal_group_settings: the learning rates, betas and weight decays of a run after a universal load."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_patches.engine.registry import FIXES
from universal import ours
from universal_loads import checkpoints, kinds, output_of_resume, resumed
from upstream import all_releases, releases, with_fix, without_fix
from zero_checkpoints import convert, of_ranks, with_layers

FIX = "universal_group_settings"

NEWEST, OLD = "0.14.0", "0.12.6"
AFFECTED = releases("deepspeed", newest=NEWEST) if all_releases() else [NEWEST]

TAG = "global_step2"
GROUPS = ["group 0", "group 1"]
SETTINGS = "--settings"
WARNING = "This universal checkpoint has settings of 0 param groups, and this run has 2: "


def converted(version: str, delivery: str, to: Path, fixes: tuple[str, ...] = ()) -> Path:
    """By kind, the output of the release's own converter for a training's checkpoints."""
    sources = []
    for kind in kinds(version):
        shutil.copytree(checkpoints(version) / kind / TAG, to / "sources" / kind / TAG)
        sources.append(with_layers(to / "sources" / kind / TAG))
    outcome = convert(to / "universal", *sources, version=version, delivery=delivery, fixes=fixes)
    assert outcome == dict.fromkeys(kinds(version), "")
    return to / "universal"


def common_state(universal: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(universal / "zero" / "optimizer_state.pt", weights_only=False)
    return found


@without_fix(AFFECTED)
def test_upstream_goes_on_with_the_settings_that_the_run_was_started_with(version: str, delivery: str) -> None:
    """Upstream silently ignores the settings in the checkpoint."""
    found = resumed(version, delivery, SETTINGS, "--load-only", "--steps", "1")
    for result in found.values():
        assert set(GROUPS) <= set(result["loaded"])


@without_fix(AFFECTED)
def test_upstream_leaves_the_settings_out_of_a_universal_checkpoint(
    version: str, delivery: str, tmp_path: Path
) -> None:
    assert convert(tmp_path, of_ranks(10), version=version, delivery=delivery) == {"10": ""}
    assert "param_groups" not in common_state(tmp_path / "10")


@with_fix(AFFECTED)
def test_goes_on_with_the_settings_that_were_saved(version: str, delivery: str, tmp_path: Path) -> None:
    """The release's converter keeps the settings; all other state equals that of the run that saved."""
    universal = converted(version, delivery, tmp_path)
    for found in resumed(version, delivery, SETTINGS, "--universal", str(universal)).values():
        assert found["loaded"] == found["loaded again"] == []
        assert found["losses"] == found["expected"]


@pytest.mark.parametrize("version", AFFECTED)
def test_says_once_that_a_checkpoint_has_no_settings_and_loads_it_as_ever(version: str, tmp_path: Path) -> None:
    """A checkpoint converted without this fix loads as before, with one warning."""
    universal = converted(version, "hook", tmp_path, fixes=tuple(name for name in FIXES if name != FIX))
    options = (SETTINGS, "--load-only", "--universal", str(universal))
    found, output = output_of_resume(version, "hook", *options)
    assert {kind: result["loaded"] for kind, result in found.items()} == dict.fromkeys(kinds(version), GROUPS)
    assert output.count(WARNING) == len(kinds(version))


@pytest.mark.slow
@pytest.mark.parametrize("version", [OLD, NEWEST])
def test_bf16_optimizer_reads_what_stage_1_has_written(version: str, tmp_path: Path) -> None:
    """The settings load, though the file has a loss scaler, a class that torch does not load by default."""
    shutil.copytree(checkpoints(version) / "stage1" / "universal", tmp_path / "bf16_optimizer")
    options = (SETTINGS, "--load-only", "--universal", str(tmp_path))
    found, _ = output_of_resume(version, "hook", *options, of=("bf16_optimizer",))
    assert not set(GROUPS) & set(found["bf16_optimizer"]["loaded"])


@pytest.mark.slow
@pytest.mark.parametrize("version", [OLD, NEWEST])
def test_the_one_pass_converter_keeps_them(version: str, tmp_path: Path) -> None:
    ours(checkpoints(version) / "bf16_optimizer" / TAG, tmp_path / "universal", version=version)
    groups = common_state(tmp_path / "universal")["param_groups"]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(1e-2, 0.01), (3e-3, 0.0)]
