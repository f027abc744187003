import copy
import os
import tempfile
import unittest
import warnings

import torch

SKIP_TEST = None
try:
    from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
except ImportError as e:
    SKIP_TEST = e

# Ties above even and odd BF16 values, their neighbors, and values without a remainder.
BITS = [0x3C008000, 0x3C018000, 0x3C007FFF, 0x3C008001, 0x3C018001, 0x3C000000, 0x3C010000, 0]


@unittest.skipIf(SKIP_TEST, f"{SKIP_TEST}")
class RemainderRoundingTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        store = os.path.join(self.folder.name, "store")
        torch.distributed.init_process_group(
            "nccl", init_method=f"file://{store}", rank=0, world_size=1
        )

    def tearDown(self):
        torch.distributed.destroy_process_group()
        self.folder.cleanup()

    def make(self, weight, store_param_remainders=True):
        param = torch.nn.Parameter(weight.bfloat16().cuda())
        optimizer = DistributedFusedAdam(
            [param],
            lr=1e-5,
            bucket_cap_mb=1e-3,
            param_sync_dtype=torch.bfloat16,
            store_params=not store_param_remainders,
            store_param_remainders=store_param_remainders,
            overlap_grad_sync=False,
        )
        return param, optimizer

    def step(self, param, optimizer):
        param.grad = torch.linspace(-1, 1, param.numel()).bfloat16().cuda()
        optimizer.step()
        optimizer.zero_grad()

    def masters(self, optimizer):
        return optimizer.state_dict()["state"][0]["param"].clone()

    def saved(self):
        """A state with these FP32 params and their negatives, in several buckets."""
        bits = torch.tensor(BITS, dtype=torch.int32).repeat(100)
        fp32 = torch.cat([bits.view(torch.float32), -bits.view(torch.float32)])
        param, optimizer = self.make(torch.ones(fp32.numel()))
        self.step(param, optimizer)
        state = optimizer.state_dict()
        state["state"][0]["param"].copy_(fp32)
        return fp32, state

    def rounded_by_kernel(self, fp32):
        bits = fp32.view(torch.int32)
        return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)

    def test_loaded_params_are_the_saved_ones(self):
        for rounded in (torch.Tensor.bfloat16, self.rounded_by_kernel):
            for first in ("model", "optimizer"):
                fp32, state = self.saved()
                weight = rounded(fp32)
                param, optimizer = self.make(weight if first == "model" else fp32 + 1)
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", message="Expected BF16 params")
                    optimizer.load_state_dict(copy.deepcopy(state))
                    if first == "optimizer":
                        param.detach().copy_(weight)
                    found = self.masters(optimizer)
                torch.testing.assert_close(found, fp32, rtol=0, atol=0)
                torch.testing.assert_close(
                    param.detach().cpu(), self.rounded_by_kernel(fp32), rtol=0, atol=0
                )

    def test_other_weights_are_taken_without_remainders(self):
        fp32, state = self.saved()
        other = self.rounded_by_kernel(fp32)
        other[::3] = 2
        _, optimizer = self.make(other)
        optimizer.load_state_dict(state)
        count = other[::3].numel()
        with self.assertWarnsRegex(UserWarning, f"found {count} elements that are others"):
            found = self.masters(optimizer)
        expected = fp32.clone()
        expected[::3] = 2
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


if __name__ == "__main__":
    unittest.main()
