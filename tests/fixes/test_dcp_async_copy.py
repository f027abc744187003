"""dcp_async_copy: `dcp.async_save` writes the tensors of its step."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainers.lazy import dcp_saving
from trainers.ranks import free_port, results
from upstream import INSTALLED_TORCH, called, proof

test_tensors_are_those_of_a_later_step, test_all_tensors_are_those_of_the_save = proof(
    __file__, "are those of a later step, and no error"
)


# Further cases

# With a `checkpoint_id` torch has a stager of its own since 2.9, which refuses sharded tensors.
BY_ID = ("tensor", "parameter", "DTensor", "scalar", "scalar DTensor")


ON: dict[str, Any] = {"version": INSTALLED_TORCH, "delivery": "hook"}


@pytest.mark.parametrize("kinds", [(), BY_ID], ids=["writer", "id"])
def test_a_save_has_the_tensors_of_its_step(kinds: tuple[str, ...]) -> None:
    assert called(__file__, "later_tensors", kinds, **ON) == []


def test_a_cached_copy_is_of_the_last_save() -> None:
    """A stager can keep its copies, and copies into them at the next save. Other tensors would need pinned memory."""
    none, hook = (called(__file__, "staged_values", **ON | {"delivery": one}) for one in ("none", "hook"))
    assert (none, hook) == ([1.0, 2.0], [0.0, 1.0])


def test_a_sharded_tensor_without_a_shard_here_is_left_alone() -> None:
    assert called(__file__, "is_staged_as_it_is", **ON) is True


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


def later_tensors(folder: Path, by_id: list[str]) -> list[str]:
    """The kinds of tensors whose saved values are of the step; with kinds, of these, by a `checkpoint_id`."""
    if not by_id:
        return dcp_saving.save_and_step(0, folder)
    return dcp_saving.save_and_step(0, folder, by_writer=False, kinds=tuple(by_id))


def staged_values(folder: Path) -> list[float]:
    """The values that a stager with a cache returns, read after another step."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    local = torch.zeros(dcp_saving.SHAPE)
    found = []
    for _ in range(2):
        # As a state dict of each save has it: another object on the same memory.
        staged = stager.stage({"scale": dcp_saving.KINDS["scalar DTensor"](local)})
        local += 1
        found.append(staged["scale"].item())
    dist.destroy_process_group()
    return found


def is_staged_as_it_is(folder: Path) -> bool:
    """Whether a stager returns a sharded tensor that has no shard on this rank, on a backend other than Gloo.

    A conversion would ask for the GPU there, and fail on this rank alone.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, TensorProperties
    from torch.distributed.checkpoint.staging import BlockingAsyncStager
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    own = [ShardMetadata([0, 0], [4, 3], "rank:0/cpu")]
    described = ShardedTensorMetadata(own, torch.Size([4, 3]), TensorProperties(torch.float32))
    tensor = ShardedTensor._init_from_local_shards_and_global_metadata([], described)
    return BlockingAsyncStager().stage({"weight": tensor})["weight"] is tensor
