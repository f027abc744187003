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

import time

import pytest
import torch

from nvidia_resiliency_ext.checkpointing.async_ckpt import filesystem_async
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest


@pytest.fixture(autouse=True)
def one_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 'cpu')
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_aborted_call_is_not_finalized():
    finalized = []
    calls = AsyncCallsQueue(persistent=False)
    request = AsyncRequest(time.sleep, (600,), [lambda: finalized.append('aborted')])
    calls.schedule_async_request(request._replace(async_fn_kwargs={}))
    process = calls.async_calls[0].async_caller.process

    calls.close(abort=True)

    process.join(timeout=10)
    is_alive = process.is_alive()
    process.kill()
    assert not is_alive
    assert calls.maybe_finalize_async_calls(blocking=True) == []
    assert finalized == []


def test_results_of_an_aborted_save_are_forgotten(monkeypatch):
    reported = object()
    monkeypatch.setattr(filesystem_async, '_results_queue', reported)

    AsyncCallsQueue().close(abort=True)

    assert filesystem_async._results_queue is not reported
