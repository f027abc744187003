# Owner(s): ["oncall: distributed checkpointing"]

import tempfile
import threading

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.common_utils import run_tests, TestCase


class WaitingPlanner(dcp.DefaultSavePlanner):
    def __init__(self, is_changed):
        super().__init__()
        self.is_changed = is_changed

    def create_local_plan(self):
        self.is_changed.wait()
        return super().create_local_plan()


class TestAsyncSaveCopies(TestCase):
    def setUp(self):
        super().setUp()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def tearDown(self):
        dist.destroy_process_group()
        super().tearDown()

    def test_tensors_that_change_after_async_save(self):
        mesh = init_device_mesh("cpu", (1,))
        tensors = {key: torch.zeros(2, 2) for key in ("plain", "dtensor", "sharded")}
        shard = Shard.from_tensor_and_offsets(tensors["sharded"], [0, 0], 0)
        scalar = tensors["dtensor"][0, 0]
        state_dict = {
            "plain": [tensors["plain"]],
            "dtensor": DTensor.from_local(scalar, mesh, [Replicate()]),
            "sharded": ShardedTensor._init_from_local_shards([shard], 2, 2),
        }
        is_changed = threading.Event()
        with tempfile.TemporaryDirectory() as path:
            future = dcp.async_save(
                state_dict,
                storage_writer=dcp.FileSystemWriter(path),
                planner=WaitingPlanner(is_changed),
            )
            for tensor in tensors.values():
                tensor.fill_(1)
            is_changed.set()
            future.result()

            for tensor in tensors.values():
                tensor.fill_(2)
            dcp.load(state_dict, checkpoint_id=path)
        for key, tensor in tensors.items():
            self.assertEqual(tensor[0, 0].item(), 0, msg=key)
        self.assertEqual(tensors["plain"], torch.zeros(2, 2))
        self.assertEqual(tensors["sharded"], torch.zeros(2, 2))


if __name__ == "__main__":
    run_tests()
