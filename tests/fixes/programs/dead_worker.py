"""End the worker of an asynchronous save of megatron-core or NVRx on the last rank; print the error of each rank.

Prints a JSON list by rank: the error that it raises, "" if none, or "waits". Only the name of OUT is used.

    dead_worker.py OUT staging|scheduled|writing|forked [--ranks 2] [--blocking] [--alone]

staging: a persistent worker ends while it stages; scheduled: before a save is scheduled; writing, forked: while a
persistent or a forked worker writes. With `--alone` ranks do not communicate. Closing the caller afterwards must not
wait.
"""

import argparse
import contextlib
import importlib
import json
import multiprocessing.connection
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from trainers import fake_gpu

fake_gpu.install()

import torch.distributed as dist  # noqa: E402  after the GPU stub

from patience import seconds  # noqa: E402
from program_arguments import parsed  # noqa: E402
from trainers.ranks import free_port, results  # noqa: E402

CALLERS = (
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "nvidia_resiliency_ext.checkpointing.async_ckpt.core",
)
ALONE, TOGETHER = seconds(4), seconds(120)  # after a worker's end; a rank that waits longer would wait forever
KEPT: list[Any] = []  # kept until the process ends: without the fix, freeing it also waits for the worker


def main() -> None:
    options = parsed({"out": Path, "what": str}, ranks=2, blocking=False, alone=False)
    print(json.dumps(results(told, options.ranks, free_port(), options)))


def classes() -> Any:
    for name in CALLERS:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise ModuleNotFoundError(f"expected one of {', '.join(CALLERS)}")


def told(rank: int, port: int, options: argparse.Namespace) -> str:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=options.ranks)
    upstream = classes()
    calls = upstream.AsyncCallsQueue(persistent=options.what != "forked")
    KEPT.append(calls)
    is_ended = rank == options.ranks - 1
    if is_ended:
        signal.signal(signal.SIGALRM, interrupt)
        # Long where other ranks start their workers, or where nobody is expected to wait.
        patience = ALONE if options.ranks == 1 and options.what != "forked" else TOGETHER
        threading.Thread(target=set_alarm_at_end_of_worker, args=[patience], daemon=True).start()
    try:
        save(calls, upstream.AsyncRequest, options, is_ended)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    else:
        found = ""
    finally:
        signal.alarm(0)
    if is_ended and found.startswith("RuntimeError"):
        calls._get_async_caller().close()
    for worker in multiprocessing.active_children():
        worker.kill()
    return found


def save(calls: Any, request: type, options: argparse.Namespace, is_ended: bool) -> None:
    if options.what == "scheduled":
        calls.schedule_async_request(request(time.sleep, (0,), [], async_fn_kwargs={}))
        calls.maybe_finalize_async_calls(blocking=True)
        if is_ended:
            end(calls)
    busy = 0 if options.blocking and not is_ended else 600  # seconds; a worker that others wait for must finish
    stage = None
    if options.what in ("staging", "scheduled"):
        stage = die if is_ended and options.what == "staging" else float
    asked = request(sleep, (None, None, busy), [], async_fn_kwargs={}, preload_fn=stage)
    calls.schedule_async_request(asked)
    if is_ended and options.what in ("writing", "forked"):
        end(calls)
    dist.barrier()
    for _ in range(20):
        calls.maybe_finalize_async_calls(blocking=options.blocking, no_dist=options.alone)
        if options.blocking:
            break
        time.sleep(0.05)


def sleep(_: None, staged: object, busy: float) -> None:
    time.sleep(busy)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def worker_of(calls: Any) -> Any:
    return calls.async_calls[-1].async_caller.process if calls.async_calls else calls._get_async_caller().process


def end(calls: Any) -> None:
    os.kill(worker_of(calls).pid, signal.SIGKILL)
    worker_of(calls).join()


def set_alarm_at_end_of_worker(patience: float) -> None:
    while (children := multiprocessing.active_children()) == []:
        time.sleep(0.05)
    multiprocessing.connection.wait([child.sentinel for child in children])
    signal.setitimer(signal.ITIMER_REAL, patience)


def interrupt(*_: object) -> None:
    raise TimeoutError("waits")


if __name__ == "__main__":
    main()
