"""dcp_async_copy: `dcp.async_save` writes the tensors of its step."""

import subprocess
import sys
from pathlib import Path

import pytest

from trainers.lazy import dcp_saving
from trainers.ranks import results
from upstream import INSTALLED_TORCH, proof, run_json, tree

test_tensors_are_those_of_a_later_step, test_all_tensors_are_those_of_the_save = proof(
    __file__, "are those of a later step, and no error"
)


# Further cases

# With a `checkpoint_id` torch has a stager of its own since 2.9, which refuses sharded tensors.
BY_ID = ("tensor", "parameter", "DTensor", "scalar", "scalar DTensor")


@pytest.mark.parametrize(("target", "kinds"), [("writer", ()), ("id", BY_ID)], ids=["writer", "id"])
def test_a_save_has_the_tensors_of_its_step(target: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    here = tree("torch", INSTALLED_TORCH)
    assert run_json("dcp_async_save", target, tmp_path, *kinds, tree=here, delivery="hook") == []


def test_a_cached_copy_is_of_the_last_save(tmp_path: Path) -> None:
    """A stager can keep its copies, and copies into them at the next save. Other tensors would need pinned memory."""
    found = {
        delivery: run_json("dcp_async_save", "cached", tmp_path, tree=tree("torch", INSTALLED_TORCH), delivery=delivery)
        for delivery in ("none", "hook")
    }
    assert found == {"none": [1.0, 2.0], "hook": [0.0, 1.0]}


def test_a_sharded_tensor_without_a_shard_here_is_left_alone(tmp_path: Path) -> None:
    assert run_json("dcp_async_save", "empty", tmp_path, tree=tree("torch", INSTALLED_TORCH), delivery="hook") is True


def test_import_of_torch_loads_nothing_of_ours() -> None:
    """Only the finder is there: the hook and the fixes are loaded at the first module of checkpoints."""
    ours = "sorted(name for name in sys.modules if name.startswith('ckpt_patches.hook.'))"
    program = f"import sys, torch, torch.distributed; print({ours}); import torch.distributed.checkpoint; print({ours})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "[]",
        "['ckpt_patches.hook.functions', 'ckpt_patches.hook.log_lines', 'ckpt_patches.hook.running']",
    ]


# What the ranks run


def bug(folder: Path) -> str:
    later = results(dcp_saving.save_and_step, 1, folder)[0]
    count = f"{len(later)} of {len(dcp_saving.KINDS)} tensors"
    return f"{count} are those of a later step, and no error: {', '.join(later)}" if later else ""
