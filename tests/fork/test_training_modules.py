"""Fixes of megatron.training belong to the package megatron-core and are planned when a program imports it."""

from pathlib import Path

import pytest

from ckpt_patches.engine.plan import Outcome, plan_tree
from ckpt_patches.engine.registry import CORE
from registered import FIXES, TARGETS
from small_tree import IS_PATCHED, MODULE, command, make, python
from upstream import newest, tree

FIX = "expert_rng"
TRAINING = "megatron.training.checkpointing"
# The code that the fix reads, in a module that imports nothing.
TEXT = """Any = CheckpointType = ShardedObject = dist_checkpointing = get_args = mpu = print_rank_0 = None
tensor_parallel = torch = None


def get_rng_state(ckpt_format):
    if ckpt_format == 'torch_dist':
        rng_state_list = ShardedObject("rng_state", [], (pp_size, tp_size), (0, 0), replica_id=0)
    elif ckpt_format == 'fsdp_dtensor':
        rng_state_list = {f'({pp_rank}, {tp_rank})': rng_state_list}
    return rng_state_list


def save_checkpoint(ckpt_type):
    rng_state = get_rng_state("torch_dist")


def load_checkpoint(args, state_dict, checkpoint_name, ckpt_type):
    ignore_rng_state = False
    if ckpt_tp_pp == run_tp_pp:
        gen_sd_rng_state = get_rng_state("torch_dist")
    elif not args.no_load_rng:
        gen_sd_rng_state = get_rng_state("fsdp_dtensor")
    if f'({pp_rank}, {tp_rank})' in state_dict['rng_state']:
        rng_state = state_dict['rng_state'][f'({pp_rank}, {tp_rank})']
"""
IS_THERE = f"import {TRAINING} as t; print(hasattr(t, 'rng_state_to_load'))"
OTHERS = [name for name, modules in FIXES.items() if name != FIX and TRAINING in modules]
STRICT = {"CKPT_PATCHES": "strict", "CKPT_PATCHES_SKIP": ",".join(OTHERS)}


def training(root: Path, text: str = TEXT) -> Path:
    path = root.joinpath(*TRAINING.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True)
    (path.parent / "__init__.py").touch()
    path.write_text(text)
    return path


def test_it_is_planned_when_it_is_imported(tmp_path: Path) -> None:
    """An unreadable file does not affect programs that use only megatron.core."""
    make(tmp_path)
    path = training(tmp_path, "def get_rng_state(:\n")
    assert python("-c", IS_PATCHED, tree=tmp_path, env=STRICT).stdout == "True\n"
    done = python("-c", f"{IS_PATCHED}; {IS_THERE}", tree=tmp_path, env=STRICT, check=False)
    assert done.stdout == "True\n"
    assert f"StrictModeError: the fix {FIX} is NOT active: " in done.stderr
    assert "The bug may be in this megatron-lm 0.14.0" in done.stderr
    path.write_text(TEXT)
    for order in (f"{IS_PATCHED}; {IS_THERE}", f"{IS_THERE}; {IS_PATCHED}"):
        done = python("-c", order, tree=tmp_path, env=STRICT)
        assert done.stdout == "True\nTrue\n"
        lines = sorted(line.partition("INFO: ")[2] for line in done.stderr.splitlines())
        assert lines == [
            f"1 fix active on {name} 0.14.0 (ckpt-patches status)" for name in ("megatron-core", "megatron-lm")
        ]


def test_where_it_needs_nothing_nothing_is_said(tmp_path: Path) -> None:
    make(tmp_path)
    training(tmp_path, TEXT.replace("(pp_size, tp_size)", "(pp_size, tp_size, dp_size)"))
    done = python("-c", f"{IS_PATCHED}; {IS_THERE}", tree=tmp_path, env=STRICT)
    assert done.stdout == "True\nFalse\n"
    assert len(done.stderr.splitlines()) == 1


def test_it_may_come_from_another_tree(tmp_path: Path) -> None:
    """Both trees get their fixes without warnings, as with a checkout behind an installed megatron-core."""
    make(tmp_path / "core")
    training(tmp_path / "training")
    path = {**STRICT, "PYTHONPATH": f"{tmp_path / 'core'}:{tmp_path / 'training'}"}
    done = python("-c", f"{IS_PATCHED}; {IS_THERE}", tree=tmp_path, env=path)
    assert done.stdout == "True\nTrue\n"
    assert "WARNING" not in done.stderr


def test_its_fixes_are_of_megatron_core(tmp_path: Path) -> None:
    make(tmp_path)
    path = training(tmp_path)
    assert TARGETS[TRAINING] == TARGETS[MODULE] == CORE
    assert command("apply", FIX, "--tree", str(tmp_path)).returncode == 0
    assert "def rng_state_to_load" in path.read_text()
    assert python("-c", IS_THERE, tree=tmp_path, env={"CKPT_PATCHES": "off"}).stdout == "True\n"
    assert command("revert", "--tree", str(tmp_path)).returncode == 0
    assert path.read_text() == TEXT


@pytest.mark.parametrize("version", [newest("megatron-core")])
def test_a_tree_of_a_release_without_it_lacks_nothing(version: str, tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron/core").symlink_to(tree("megatron-core", version) / "megatron/core")
    (result,) = plan_tree(str(tmp_path), CORE, [FIX]).results
    assert result.outcome is Outcome.NOT_NEEDED
    (tmp_path / "megatron/training").mkdir()
    (result,) = plan_tree(str(tmp_path), CORE, [FIX]).results
    assert result.outcome is Outcome.NO_MATCH
    assert "there is no such file" in result.reason
