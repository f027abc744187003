"""The process that keeps what the writers of an asynchronous save report, forked and not started anew on each rank."""

import ctypes
import multiprocessing.managers
import signal
from typing import Any

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def fork_keeper(writers: Any) -> None:
    """Replace the keeper of a module `filesystem_async`, of megatron-core or NVRx: upstream's is a new interpreter.

    It starts when the first save asks for it, as upstream's does: most ranks save nothing.
    """

    def results_queue(mp_mode: str = "fork") -> Any:
        if writers._results_queue is None:
            keeper = multiprocessing.managers.SyncManager(ctx=multiprocessing.get_context("fork"))
            keeper.start(end_with_parent)
            writers._results_queue = keeper.Queue()
        return writers._results_queue

    for name in ("get_write_results_queue", "_get_write_results_queue"):  # in later releases, and in earlier ones
        if hasattr(writers, name):
            setattr(writers, name, results_queue)


def end_with_parent() -> None:
    """Who waits for a rank that was killed would else wait for this process, too, which holds the same pipe."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
