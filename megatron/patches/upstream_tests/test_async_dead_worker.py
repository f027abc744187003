# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

import os
import signal
import time

import pytest
import torch

from megatron.core.dist_checkpointing.strategies import async_utils
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest


@pytest.fixture(autouse=True)
def one_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_killed_worker_is_an_error():
    calls = AsyncCallsQueue(persistent=False)
    calls.schedule_async_request(AsyncRequest(time.sleep, (600,), [], async_fn_kwargs={}))
    caller = calls.async_calls[0].async_caller
    os.kill(caller.process.pid, signal.SIGKILL)

    with pytest.raises(RuntimeError, match="exit code -9"):
        calls.maybe_finalize_async_calls(blocking=True)

    calls.async_calls.clear()


class EndedWorker:
    exitcode = -9

    def is_alive(self):
        return False


def test_ended_persistent_worker_is_an_error(monkeypatch):
    caller = async_utils.PersistentAsyncCaller()
    caller._persistent_comp_q = caller.comp_q = torch.multiprocessing.get_context("spawn").Queue()
    caller.process = EndedWorker()

    try:
        with pytest.raises(RuntimeError, match="exit code -9"):
            caller.is_current_async_call_done()
    finally:
        caller.process = None
