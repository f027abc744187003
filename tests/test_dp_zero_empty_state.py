"""dp_zero_empty_state: the real megatron-core saves an optimizer state that is empty, or has lost entries."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import edits
from ckpt_patches.engine.plan import Outcome
from upstream import DELIVERIES, checkpoint_formats, releases, run, tree

FIX = "dp_zero_empty_state"
DISTRIB_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
ALL = releases("megatron-core")
NEWEST = "0.19.2"


def save_and_resume(
    version: str, delivery: str, tmp_path: Path, *options: str, only: tuple[str, ...] = (), timeout: float = 200
) -> dict[str, dict[str, Any]]:
    """What the save in each format did on all ranks, by format."""
    names = [name for name in checkpoint_formats(version) if not only or name in only]
    done = run(
        "empty_state",
        tmp_path / "out",
        "--formats",
        ",".join(names),
        *options,
        tree=tree("megatron-core", version),
        delivery=delivery,
        timeout=timeout,
        check=delivery != "none",
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["format"]: line for line in lines}


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", ["none"])
@pytest.mark.parametrize("version", ALL)
def test_upstream_dies_saving_an_empty_state(version: str, delivery: str, tmp_path: Path) -> None:
    found = save_and_resume(version, delivery, tmp_path, only=("torch",))
    assert found["torch"]["error"] == "save: KeyError: 'exp_avg'"


@pytest.mark.compat(fix=FIX)
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("version", ALL)
def test_an_empty_state_is_saved_and_resumed_bit_for_bit_in_every_format(
    version: str, delivery: str, tmp_path: Path
) -> None:
    found = save_and_resume(version, delivery, tmp_path)
    assert {name: (line["error"], line["resume"]) for name, line in found.items()} == dict.fromkeys(
        checkpoint_formats(version), ("", "bit-equal")
    )
    assert not [warning for line in found.values() for warning in line["warnings"]]
    assert found["torch"]["keys"] == ["exp_avg", "exp_avg_sq", "numel_unpadded", "param"]


@pytest.mark.slow
@pytest.mark.parametrize("inner", [("--inner", "torch"), ("--precision-aware",), ("--fp16",)], ids=" ".join)
@pytest.mark.parametrize("version", releases("megatron-core", oldest="0.14.0"))
def test_for_every_inner_optimizer(version: str, inner: tuple[str, ...], tmp_path: Path) -> None:
    found = save_and_resume(version, "hook", tmp_path, *inner)
    assert {name: (line["error"], line["resume"]) for name, line in found.items()} == dict.fromkeys(
        checkpoint_formats(version), ("", "bit-equal")
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision_aware", [(), ("--precision-aware",)], ids=["", "precision-aware"])
def test_under_hybrid_cpu_offload(precision_aware: tuple[str, ...], tmp_path: Path) -> None:
    options = ("--inner", "torch", "--offload-fraction", "0.5", *precision_aware)
    died = save_and_resume(NEWEST, "none", tmp_path / "none", *options, only=("torch",))["torch"]["error"]
    assert died.startswith("save: KeyError")
    found = save_and_resume(NEWEST, "hook", tmp_path / "hook", *options)
    assert {line["resume"] for line in found.values()} == {"bit-equal"}
    assert found["torch"]["keys"] == ["exp_avg", "exp_avg_sq", "numel_unpadded", "param"]


def test_skipped_fp16_steps_leave_an_empty_state_that_is_no_loss(tmp_path: Path) -> None:
    """The loss scaler starts at 2^32, so the first steps overflow and are skipped."""
    found = save_and_resume(NEWEST, "hook", tmp_path, "--fp16", "--steps", "2", only=("torch",))
    assert (found["torch"]["error"], found["torch"]["warnings"]) == ("", [])


@pytest.mark.slow
@pytest.mark.parametrize("lose", ["moment", "parameter", "all"])
def test_a_lost_state_is_saved_and_said_aloud(lose: str, tmp_path: Path) -> None:
    only = ("torch", "dp_reshardable", "fully_reshardable")
    found = save_and_resume(NEWEST, "hook", tmp_path, "--steps", "2", "--lose", lose, only=only)
    for name in only:
        assert found[name]["error"] == ""
        (warning,) = set(found[name]["warnings"])
        assert warning.startswith("rank 1: 1 of 1 parameters have stepped and lack optimizer state")
        assert warning.endswith("module.a.weight")


def test_a_whole_state_is_saved_without_a_word(tmp_path: Path) -> None:
    found = save_and_resume(NEWEST, "hook", tmp_path, "--steps", "2")
    assert not [warning for line in found.values() for warning in line["warnings"]]
    assert {line["resume"] for line in found.values()} == {"bit-equal"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.optimizer.state[main_param]", "self.inner.state[main_param]"),
        ('tensors.pop("master_param")', 'tensors.pop("main_param")'),
        ("def state_dict(self", "def to_state_dict(self"),
    ],
)
def test_unknown_code_is_left_alone_as_a_whole(tmp_path: Path, old: str, new: str) -> None:
    copy = edits.copy_of(tree("megatron-core", NEWEST), FIX, tmp_path)
    edits.check_left_alone(copy, FIX, DISTRIB_OPTIMIZER, old, new)


@pytest.mark.parametrize("version", ["0.7.0", NEWEST])
def test_the_edited_look_ups(version: str) -> None:
    _, made = edits.plan(tree("megatron-core", version), FIX)
    added = edits.added_lines(made)["distrib_optimizer"]
    look_ups = added.count("optim_state = self._saved_optimizer_state(main_param)")
    assert look_ups == {"0.7.0": 2, NEWEST: 1}[version]
    assert added.count("self._warn_about_lost_state()") == {"0.7.0": 2, NEWEST: 3}[version]


def test_the_diff_for_upstream_warns_of_nothing() -> None:
    root = tree("megatron-core", NEWEST)
    result, made = edits.plan(root, FIX, for_upstream=True)
    assert result.outcome is Outcome.APPLIES
    assert not [line for lines in edits.added_lines(made).values() for line in lines if "warn" in line]


def test_where_upstream_has_the_change_the_warning_does_not_come_back(tmp_path: Path) -> None:
    copy = edits.copy_of(tree("megatron-core", NEWEST), FIX, tmp_path)
    edits.write(edits.plan(copy, FIX, for_upstream=True)[1])
    result, made = edits.plan(copy, FIX)
    assert (result.outcome, made.files) == (Outcome.ALREADY_THERE, {})


def test_the_keys_are_upstreams_own_where_upstream_names_them() -> None:
    """Releases after those on the index have a property for them, because an optimizer may have one moment alone."""
    methods = vars(importlib.import_module(f"megatron_patches.{FIX}"))["DistributedOptimizer"]
    optimizer = methods.__new__(methods)
    optimizer.optimizer_state_keys = ("exp_avg",)
    assert optimizer._missing_state_keys({}) == ["exp_avg"]
    del optimizer.optimizer_state_keys
    optimizer.optimizer = SimpleNamespace(param_groups=[{"betas": (0.9, 0.99)}])
    assert optimizer._missing_state_keys({"exp_avg": 1}) == ["exp_avg_sq"]
    optimizer.optimizer = SimpleNamespace(param_groups=[{"momentum": 0.9}])
    assert optimizer._missing_state_keys({}) == []
