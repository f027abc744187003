# Copyright (c) 2025, NVIDIA CORPORATION. All rights reserved.

from queue import Queue

import pytest
import torch

from megatron.core.dist_checkpointing.strategies import async_utils
from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncRequest,
    PersistentAsyncCaller,
)


@pytest.fixture(autouse=True)
def stay_as_this_process_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(async_utils, "_set_process_qos", lambda **_: None, raising=False)


def test_worker_writes_what_was_there_when_it_staged():
    of_trainer = torch.zeros(4).share_memory_()
    written = []

    def write(_, buckets, __):
        of_trainer.add_(1)  # the next step
        written.append(buckets[0].clone())

    request = AsyncRequest(write, (0, None, 0), [], preload_fn=lambda: [of_trainer])
    requests, preload_q = Queue(), Queue()
    for item in (request, "DONE"):
        requests.put(item)
    preload_q.put(0)

    PersistentAsyncCaller.async_loop(0, requests, preload_q, Queue())

    assert torch.equal(written[0], torch.zeros(4))
