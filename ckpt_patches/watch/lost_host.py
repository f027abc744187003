"""What `lost_host_*` lay over saves and loads: while one runs, a host that gives no sign of life ends this process."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import distributed

from ckpt_patches.watch.watch import Watch

SWITCH = "CKPT_PATCHES_LOST_HOST"

_watch: Watch | None = None
_store: Any = None  # of the process group that it is of


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """For a function in which all ranks wait for each other."""

    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        watch = _watch_of_group()
        if watch is None:
            return function(*args, **kwargs)
        with watch.during(f"{function.__module__}.{function.__qualname__}"):
            return function(*args, **kwargs)

    return inside


def _watch_of_group() -> Watch | None:
    """One for each process group; None where there is nobody else, or it cannot be."""
    global _watch, _store
    if not distributed.is_initialized() or distributed.get_world_size() < 2:
        return None
    store = distributed.distributed_c10d._get_default_store()
    if store is not _store:
        if _watch is not None:
            _watch.leave()
        _watch, _store = _begin(store), store
    return _watch


def _begin(store: Any) -> Watch | None:
    try:
        return Watch(store, distributed.get_rank(), int(os.environ[SWITCH]))
    except Exception as error:  # a job must not end for want of this
        reason = f"{type(error).__name__}: {error}"
        print(f"ckpt-patches: {SWITCH}: no lost host is noticed by this rank: {reason}", file=sys.stderr)
        return None
