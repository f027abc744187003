"""Asynchronous saves whose worker is killed while it writes: the error that megatron-core or NVRx raises per rank."""

import os
import signal
import time
from typing import Any

POLLS = 20  # one per training step; upstream would never report the error
RANKS = 2
KEPT: list[Any] = []  # kept until the process ends: freeing also waits for the worker


def told(rank: int, calls: Any, request: type) -> str:
    """The error on a rank within a few steps after the persistent worker of rank 1 was killed, or ""."""
    import torch.distributed as dist

    KEPT.append(calls)
    calls.schedule_async_request(request(time.sleep, (600,), [], async_fn_kwargs={}))
    worker = calls._get_async_caller().process
    if rank == 1:
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
    dist.barrier()
    try:
        for _ in range(POLLS):
            calls.maybe_finalize_async_calls()
            time.sleep(0.02)
    except RuntimeError as error:
        return str(error)
    finally:
        worker.kill()
    return ""


def summary(errors_by_rank: list[str]) -> str:
    """The number of ranks without an error, in words, or "" if every rank got one."""
    silent = errors_by_rank.count("")
    if not silent:
        return ""
    return f"a worker was killed, and {silent} of {RANKS} ranks raised no error in {POLLS} steps"
