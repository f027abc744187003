# SPDX-FileCopyrightText: Copyright (c) 2026 NVIDIA CORPORATION & AFFILIATES. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
# http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.

import os
import signal
import time

import pytest
import torch

from nvidia_resiliency_ext.checkpointing.async_ckpt.core import (
    AsyncCallsQueue,
    AsyncRequest,
    PersistentAsyncCaller,
)


@pytest.fixture(autouse=True)
def one_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 'cpu')
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_killed_worker_is_an_error():
    calls = AsyncCallsQueue(persistent=False)
    calls.schedule_async_request(AsyncRequest(time.sleep, (600,), [], async_fn_kwargs={}))
    caller = calls.async_calls[0].async_caller
    os.kill(caller.process.pid, signal.SIGKILL)

    with pytest.raises(RuntimeError, match='exit code -9'):
        calls.maybe_finalize_async_calls(blocking=True)

    calls.async_calls.clear()


class EndedWorker:
    exitcode = -9

    def is_alive(self):
        return False


def test_ended_persistent_worker_is_an_error():
    caller = PersistentAsyncCaller()
    caller.process = EndedWorker()

    try:
        with pytest.raises(RuntimeError, match='exit code -9'):
            caller.is_current_async_call_done()
    finally:
        caller.process = None
