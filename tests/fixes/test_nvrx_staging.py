"""nvrx_staging: NVRx saves CPU tensors as they were at the save."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from trainers.lazy import nvrx_saving
from trainers.ranks import results
from upstream import called, proof, releases

test_tensors_are_those_of_a_later_step, test_all_tensors_are_those_of_the_save = proof(
    __file__, "tensors are those of a later step, and no error"
)


# Further cases

STATE, SLACK = 64 << 20, 24 << 20  # bytes: the saved state, and a trainer's other allocations
STATE_TENSORS = 16


@pytest.mark.slow
@pytest.mark.parametrize("version", releases("nvidia-resiliency-ext"))
def test_no_worker_writes_a_later_step_and_the_state_is_copied_once(version: str, tmp_path: Path) -> None:
    found = {
        delivery: called(__file__, "of_each_worker", version=version, delivery=delivery, folder=tmp_path / delivery)
        for delivery in ("none", "hook")
    }
    grown = found["hook"].pop("bytes")
    assert found["none"].pop("bytes") < STATE / 2
    assert STATE <= grown < STATE + SLACK
    kinds = {"persistent", "temporary", *(["shared memory"] if version == "0.6.0" else [])}
    assert found["none"] == dict.fromkeys(kinds - {"temporary"}, 48) | {"temporary": 0}
    assert found["hook"] == dict.fromkeys(kinds, 0)


# What the ranks run


def bug(folder: Path) -> str:
    torn = results(nvrx_saving.save_and_step, 1, folder / "checkpoint", {})[0]
    return f"{torn} of {nvrx_saving.TENSORS} tensors are those of a later step, and no error" if torn else ""


def of_each_worker(folder: Path) -> dict[str, Any]:
    """By kind of worker, how many of 48 tensors have values of a later step; and the growth of a save in "bytes"."""
    saves = {name: results(nvrx_saving.save_and_step, 1, folder / name, options) for name, options in kinds().items()}
    return {name: found for name, (found,) in saves.items()} | {
        "bytes": results(bytes_of_a_save, 1, folder / "bytes")[0]
    }


def kinds() -> dict[str, dict[str, Any]]:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

    found: dict[str, dict[str, Any]] = {"persistent": {"persistent": True}, "temporary": {"persistent": False}}
    if "cpu_shm_mode" in inspect.signature(AsyncCallsQueue.__init__).parameters:  # since 0.6
        found["shared memory"] = {"persistent": True, "cpu_shm_mode": True}
    return found


def bytes_of_a_save(rank: int, checkpoint: Path) -> int:
    """The growth of the trainer's private and shared memory when its request is staged, in bytes."""
    import torch

    state = {str(number): torch.ones(STATE // STATE_TENSORS // 4) for number in range(STATE_TENSORS)}
    with nvrx_saving.calls() as calls:
        before = resident()
        calls.schedule_async_request(nvrx_saving.request(state, checkpoint))
        grown = resident() - before
        calls.maybe_finalize_async_calls(blocking=True)
    return grown


def resident() -> int:
    """Resident bytes of this process, including shared ones; see proc(5), statm."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
