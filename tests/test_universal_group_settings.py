"""universal_group_settings: whose learning rates, betas and weight decays a run has after a universal load."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import edits
from ckpt_patches.engine.plan import Outcome
from ckpt_patches.engine.registry import FIXES
from deepspeed_patches.universal_group_settings import ZeROOptimizer
from universal import ours
from universal_loads import checkpoints, kinds, output_of_resume, resumed
from upstream import DELIVERIES, all_releases, releases, tree
from zero_checkpoints import convert, of_ranks, with_layers

FIX = "universal_group_settings"

NEWEST, OLD = "0.14.0", "0.12.6"
AFFECTED = releases("deepspeed", newest=NEWEST) if all_releases() else [NEWEST]

TAG = "global_step2"
GROUPS = ["group 0", "group 1"]
SETTINGS = "--settings"
WARNING = "This universal checkpoint has settings of 0 param groups, and this run has 2: "


def converted(version: str, delivery: str, to: Path, fixes: tuple[str, ...] = ()) -> Path:
    """What the release's own converter makes of a training's checkpoints, by kind."""
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


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", ["none"])
@pytest.mark.parametrize("version", AFFECTED)
def test_upstream_goes_on_with_the_settings_that_the_run_was_started_with(version: str, delivery: str) -> None:
    """Silently, although they are in the checkpoint."""
    found = resumed(version, delivery, SETTINGS, "--load-only", "--steps", "1")
    for result in found.values():
        assert set(GROUPS) <= set(result["loaded"])


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", ["none"])
@pytest.mark.parametrize("version", AFFECTED)
def test_upstream_leaves_the_settings_out_of_a_universal_checkpoint(
    version: str, delivery: str, tmp_path: Path
) -> None:
    assert convert(tmp_path, of_ranks(10), version=version, delivery=delivery) == {"10": ""}
    assert "param_groups" not in common_state(tmp_path / "10")


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", AFFECTED)
def test_goes_on_with_the_settings_that_were_saved(version: str, delivery: str, tmp_path: Path) -> None:
    """As the release's own converter keeps them; and all else is that of the run that saved, as ever."""
    universal = converted(version, delivery, tmp_path)
    for found in resumed(version, delivery, SETTINGS, "--universal", str(universal)).values():
        assert found["loaded"] == found["loaded again"] == []
        assert found["losses"] == found["expected"]


@pytest.mark.parametrize("version", AFFECTED)
def test_says_once_that_a_checkpoint_has_no_settings_and_loads_it_as_ever(version: str, tmp_path: Path) -> None:
    """One that was converted without this fix."""
    universal = converted(version, "hook", tmp_path, fixes=tuple(name for name in FIXES if name != FIX))
    options = (SETTINGS, "--load-only", "--universal", str(universal))
    found, output = output_of_resume(version, "hook", *options)
    assert {kind: result["loaded"] for kind, result in found.items()} == dict.fromkeys(kinds(version), GROUPS)
    assert output.count(WARNING) == len(kinds(version))


@pytest.mark.slow
@pytest.mark.parametrize("version", [OLD, NEWEST])
def test_bf16_optimizer_reads_what_stage_1_has_written(version: str, tmp_path: Path) -> None:
    """In that file there is a loss scaler, a class of DeepSpeed's that torch does not load by itself."""
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


# The edits themselves

CONVERTER = "deepspeed.checkpoint.ds_to_universal"
STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2"
BF16_OPTIMIZER = "deepspeed.runtime.bf16_optimizer"
LOAD = "self._load_group_settings(optim_sd)"


@pytest.mark.parametrize("version", [OLD, NEWEST])
def test_what_is_added(version: str) -> None:
    result, plan = edits.plan(tree("deepspeed", version), FIX)
    assert result.outcome is Outcome.APPLIES
    method = edits.definition(tree("deepspeed", version), STAGE_1_AND_2, ZeROOptimizer._load_group_settings, indent=4)
    assert {module: [line for line in added if line] for module, added in edits.added_lines(plan).items()} == {
        "ds_to_universal": ['output_sd["param_groups"] = optim_sd[BASE_OPTIMIZER_STATE]["param_groups"]'],
        "stage_1_and_2": [*method, LOAD],
        "bf16_optimizer": [
            *method,
            "from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine",
            'optim_state_path = os.path.join(checkpoint_dir, "optimizer_state.pt")',
            "optim_sd = {}",
            "if os.path.isfile(optim_state_path):",
            'optim_sd = TorchCheckpointEngine().load(optim_state_path, map_location="cpu")',
            LOAD,
        ],
    }


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", releases("deepspeed", oldest="0.14.1"))
def test_fixed_upstream(version: str, delivery: str, record_property: Callable[[str, object], None]) -> None:
    edits.check_fixed_upstream(version, FIX, record_property)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return edits.copy_of(tree("deepspeed", NEWEST), FIX, tmp_path)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (CONVERTER, "if k not in sharded_states", "if k in common_states"),
        (CONVERTER, "def _save_optimizer_state(", "def _save_common_state("),
        (STAGE_1_AND_2, "self._load_global_state(optim_sd)", "self._load_state(optim_sd)"),
        (STAGE_1_AND_2, "def _load_hp_checkpoint_state(", "def _load_states("),
        (BF16_OPTIMIZER, 'os.path.join(checkpoint_dir, "zero")', 'f"{checkpoint_dir}/zero"'),
        (BF16_OPTIMIZER, "def _load_universal_checkpoint(", "def _load_universal("),
    ],
)
def test_unknown_code_is_left_alone(copy: Path, module: str, old: str, new: str) -> None:
    reason = edits.check_left_alone(copy, FIX, module, old, new)
    assert f"{module.rpartition('.')[2]}.py: expected" in reason


@pytest.mark.parametrize(
    ("version", "others"),
    [
        pytest.param(OLD, ("rank_order", "torch_load_weights_only"), marks=pytest.mark.slow),
        pytest.param(OLD, ("universal_tensor_paddings",), marks=pytest.mark.slow),
        pytest.param(NEWEST, ("rank_order", "torch_load_weights_only"), marks=pytest.mark.slow),
        (NEWEST, ("universal_all_moments", "optimizer_state_links")),
        (NEWEST, ("universal_tensor_paddings",)),
    ],
)
def test_before_or_after_other_fixes_of_these_files(version: str, others: tuple[str, ...], tmp_path: Path) -> None:
    edits.check_in_any_order(tree("deepspeed", version), (FIX, *others), tmp_path)
