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

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner

from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_plan,
)
from nvidia_resiliency_ext.checkpointing.utils import preload_tensors


@pytest.fixture
def one_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_writer_keeps_cpu_tensors_as_they_were_at_the_save(one_rank, tmp_path):
    tensor = torch.zeros(4)
    writer = FileSystemWriterAsync(tmp_path, thread_count=1)
    save_state_dict_async_plan({'w': tensor}, writer, None, 0, planner=DefaultSavePlanner())
    _, preload_fn, _ = writer.get_save_function_and_args()

    tensor.add_(1)  # the next step, before the worker has read its request

    ((_, _, (_, ((_, staged),))),) = preload_fn()
    assert torch.equal(staged, torch.zeros(4))


def test_preloaded_cpu_tensors_are_copies():
    tensor = torch.zeros(4)
    preloaded = preload_tensors({'w': [tensor]})

    tensor.add_(1)

    assert torch.equal(preloaded['w'][0], torch.zeros(4))
