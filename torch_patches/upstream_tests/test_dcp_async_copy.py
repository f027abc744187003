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
        scalar, matrix = torch.tensor(0.0), torch.zeros(2, 2)
        mesh = init_device_mesh("cpu", (1,))
        shard = Shard.from_tensor_and_offsets(matrix, [0, 0], 0)
        state_dict = {
            "scalar": scalar,
            "scalar_dtensor": DTensor.from_local(scalar, mesh, [Replicate()]),
            "matrix": [matrix],
            "sharded": ShardedTensor._init_from_local_shards([shard], 2, 2),
        }
        is_changed = threading.Event()
        with tempfile.TemporaryDirectory() as path:
            future = dcp.async_save(
                state_dict,
                storage_writer=dcp.FileSystemWriter(path),
                planner=WaitingPlanner(is_changed),
            )
            scalar.fill_(1)
            matrix.fill_(1)
            is_changed.set()
            future.result()

            saved_scalar, saved_matrix = torch.tensor(2.0), torch.full((2, 2), 2.0)
            saved_shard = Shard.from_tensor_and_offsets(saved_matrix, [0, 0], 0)
            for key, value, local in (
                ("scalar", saved_scalar, saved_scalar),
                (
                    "scalar_dtensor",
                    DTensor.from_local(saved_scalar, mesh, [Replicate()]),
                    saved_scalar,
                ),
                ("matrix", [saved_matrix], saved_matrix),
                (
                    "sharded",
                    ShardedTensor._init_from_local_shards([saved_shard], 2, 2),
                    saved_matrix,
                ),
            ):
                local.fill_(2)
                dcp.load({key: value}, checkpoint_id=path)
                self.assertEqual(local, torch.zeros_like(local), msg=key)


if __name__ == "__main__":
    run_tests()
