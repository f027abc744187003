"""The process that holds the write results of an asynchronous save, forked instead of a new interpreter per rank."""

import ctypes
import multiprocessing.managers
import signal
from typing import Any

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def fork_keeper(writers: Any) -> None:
    """Replace the keeper in a `filesystem_async` module of megatron-core or NVRx: upstream starts a new interpreter.

    It starts at the first save that needs it, as upstream's does: most ranks save nothing.
    """

    def results_queue(mp_mode: str = "fork") -> Any:
        if writers._results_queue is None:
            keeper = multiprocessing.managers.SyncManager(ctx=multiprocessing.get_context("fork"))
            keeper.start(end_with_parent)
            writers._results_queue = keeper.Queue()
        return writers._results_queue

    for name in ("get_write_results_queue", "_get_write_results_queue"):  # in later and in earlier releases
        if hasattr(writers, name):
            setattr(writers, name, results_queue)


def end_with_parent() -> None:
    """End this process with its parent. It holds the rank's pipe: else a wait for a killed rank would not end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
