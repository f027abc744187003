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


class OnDevice(torch.Tensor):
    """Stands for a tensor on a GPU."""

    @property
    def device(self):
        return torch.device('cuda', 0)


@pytest.fixture(autouse=True)
def one_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1
    )
    FileSystemWriterAsync.cleanup_tensor_caches()
    yield
    FileSystemWriterAsync.cleanup_tensor_caches()
    torch.distributed.destroy_process_group()


def sent_to_the_worker(tensor, path):
    writer = FileSystemWriterAsync(path, thread_count=1, use_cached_data_structure=True)
    save_state_dict_async_plan({'w': tensor}, writer, None, 0, planner=DefaultSavePlanner())
    return writer.cached_tensor_data


def test_tensors_are_sent_once_as_long_as_they_stay(tmp_path):
    tensor = torch.zeros(4).as_subclass(OnDevice)
    assert sent_to_the_worker(tensor, tmp_path) is not None

    tensor.add_(1)

    assert sent_to_the_worker(tensor, tmp_path) is None


def test_tensors_of_another_storage_are_sent_again(tmp_path):
    first, second = (torch.zeros(4).as_subclass(OnDevice) for _ in range(2))
    sent_to_the_worker(first, tmp_path)

    _, (sent,) = sent_to_the_worker(second, tmp_path)

    assert sent.data_ptr() == second.data_ptr()
