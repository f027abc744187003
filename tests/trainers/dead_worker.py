"""Asynchronous saves whose worker is killed on one of two ranks, and the error that each rank then raises."""

import multiprocessing
import os
import signal
import time
from typing import Any

POLLS = 20  # one per training step; upstream would never report the error
RANKS = 2
KEPT: list[Any] = []  # kept until the process ends: freeing also waits for the worker
# When the worker is killed: a persistent or a forked one while it writes; a persistent one before a save is scheduled,
# or while it stages. In the last two upstream waits forever.
WRITING, WAITING = ("writing", "forked"), ("scheduled", "staging")
KILLED, ELSEWHERE = "found it ended with exit code -9", "found that of a rank ended"


def told(rank: int, calls: Any, request: type, how: str) -> str:
    """The error on a rank within a few steps after the worker of rank 1 was killed, or ""."""
    KEPT.append(calls)
    try:
        save(rank, calls, request, how)
    except RuntimeError as error:
        if rank == 1:
            calls._get_async_caller().close()  # must not wait
        return str(error)
    finally:
        for worker in multiprocessing.active_children():
            worker.kill()
    return ""


def save(rank: int, calls: Any, request: type, how: str) -> None:
    import torch.distributed as dist

    is_ended = rank == 1
    if how == "scheduled":
        calls.schedule_async_request(request(time.sleep, (0,), [], async_fn_kwargs={}))
        calls.maybe_finalize_async_calls(blocking=True)
        if is_ended:
            end(calls)
    stages = {"scheduled": float, "staging": die if is_ended else float}
    more = {"preload_fn": stages.get(how)}
    calls.schedule_async_request(request(write, (None, None, 600), [], async_fn_kwargs={}, **more))
    if is_ended and how in WRITING:
        end(calls)
    dist.barrier()
    for _ in range(POLLS):
        calls.maybe_finalize_async_calls()
        time.sleep(0.05)


def write(_: None, staged: object, seconds: float) -> None:
    time.sleep(seconds)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def end(calls: Any) -> None:
    caller = calls.async_calls[-1].async_caller if calls.async_calls else calls._get_async_caller()
    os.kill(caller.process.pid, signal.SIGKILL)
    caller.process.join()


def summary(how: str, errors_by_rank: list[str]) -> str:
    """What is wrong about the errors of the ranks, in words, or ""."""
    silent = errors_by_rank.count("")
    if silent:
        return f"{how}: a worker was killed, and {silent} of {RANKS} ranks raised no error in {POLLS} steps"
    other, ended = errors_by_rank
    return "" if KILLED in ended and ELSEWHERE in other else f"{how}: {errors_by_rank}"
