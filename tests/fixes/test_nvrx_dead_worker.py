"""nvrx_dead_worker: if NVRx's worker dies or fails, all ranks raise an error."""

from pathlib import Path

from trainers import dead_worker
from trainers.lazy import nvrx_saving
from trainers.ranks import free_port, results
from upstream import affected, shown, with_fix, without_fix

RELEASES = affected("nvrx_dead_worker")


@without_fix(RELEASES)
def test_a_save_that_was_not_written_is_called_saved(version: str, delivery: str) -> None:
    found = shown(__file__, version, delivery)
    assert "a file that could not be written was called saved" in found
    assert "writing: a worker was killed, and " in found
    assert "forked: a worker was killed, and " in found


@with_fix(RELEASES)
def test_all_ranks_raise_an_error(version: str, delivery: str) -> None:
    assert shown(__file__, version, delivery) == ""
    assert shown(__file__, version, delivery, "where_upstream_waits") == ""


# What the ranks run


def bug(folder: Path) -> str:
    return "; ".join(filter(None, [*map(killed, dead_worker.WRITING), failed(folder)]))


def where_upstream_waits(folder: Path) -> str:
    return "; ".join(filter(None, map(killed, dead_worker.WAITING)))


def killed(how: str) -> str:
    return dead_worker.summary(how, results(told, dead_worker.RANKS, free_port(), how))


def told(rank: int, port: int, how: str) -> str:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest

    nvrx_saving.join_group(rank, dead_worker.RANKS, port)
    return dead_worker.told(rank, AsyncCallsQueue(persistent=how != "forked"), AsyncRequest, how)


def failed(folder: Path) -> str:
    is_told = results(of_torch_save, 1, folder / "no such folder/checkpoint.pt", free_port())[0]
    return "" if is_told else "a file that could not be written was called saved"


def of_torch_save(rank: int, file: Path, port: int) -> bool:
    """Whether a failed save of a forked worker raises an error in the trainer."""
    import torch
    from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

    nvrx_saving.join_group(rank, 1, port)
    saving = TorchAsyncCheckpoint(persistent_queue=False)
    saving.async_save({"w": torch.ones(4)}, file)
    try:
        saving.finalize_async_save(blocking=True)
    except RuntimeError:
        return True
    return False
