"""kill NVRx's worker while it writes; fail a forked one"""

from pathlib import Path

from trainers import cases, dead_worker, nvrx_saving, show
from trainers.ranks import free_port, results


def run(folder: Path) -> str:
    found = [case(folder) for case in cases((killed, failed))]
    return "; ".join(filter(None, found))


def killed(folder: Path) -> str:
    return dead_worker.summary(results(told, dead_worker.RANKS, free_port()))


def told(rank: int, port: int) -> str:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest

    nvrx_saving.join_group(rank, dead_worker.RANKS, port)
    return dead_worker.told(rank, AsyncCallsQueue(persistent=True), AsyncRequest)


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


if __name__ == "__main__":
    show(run, "all ranks raised an error at the next step, and for a save that failed")
