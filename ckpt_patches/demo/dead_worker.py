"""Asynchronous saves whose worker is killed while it writes: what each rank is told by megatron-core or NVRx."""

import os
import signal
import time
from typing import Any

POLLS = 20  # what training does after each step; upstream would say nothing for ever
RANKS = 2
KEPT: list[Any] = []  # not freed before the end of the process: that waits for the worker as well


def told(rank: int, calls: Any, request: type) -> str:
    """What a rank is told within a few steps after the persistent worker of rank 1 was killed."""
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


def summary(told_by_rank: list[str]) -> str:
    """What is wrong: ranks that were told nothing."""
    silent = told_by_rank.count("")
    if not silent:
        return ""
    return f"a worker was killed, and {silent} of {RANKS} ranks raised no error in {POLLS} steps"
