# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from inspect import signature

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync


class Results:
    """What the worker would send to its parent process."""

    def __init__(self):
        self.sent = []

    def put(self, item):
        self.sent.append(item)

    def get(self):
        return None

    def task_done(self):
        pass


def test_items_are_written_with_the_installed_torch(tmp_path):
    tensor = torch.arange(4.0)
    data = TensorWriteData(
        chunk=None, properties=TensorProperties.create_from_tensor(tensor), size=tensor.size()
    )
    item = WriteItem(MetadataIndex("w"), WriteItemType.TENSOR, tensor_data=data)
    bucket = (str(tmp_path / "__0_0.distcp"), "__0_0.distcp", ([], [(item, tensor)]))
    arguments = {
        "transform_list": [],
        "local_proc_idx": 0,
        "write_bucket": bucket,
        "write_results": {},
        "results_queue": Results(),
        "count_queue": Results(),
        "use_fsync": False,
    }
    write = FileSystemWriterAsync.write_preloaded_data
    write(**{name: arguments[name] for name in signature(write).parameters})

    assert torch.equal(torch.load(bucket[0]), tensor)
