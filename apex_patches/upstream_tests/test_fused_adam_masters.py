import copy
import unittest
import warnings

import torch

try:
    import apex
except ImportError:
    HAS_APEX = False
else:
    HAS_APEX = True


@unittest.skipIf(not HAS_APEX, "`apex` is not found.")
class FusedAdamMastersTest(unittest.TestCase):
    def make(self, seed, dtype=torch.float16):
        torch.manual_seed(seed)
        model = torch.nn.Linear(16, 16, bias=False).to(dtype).cuda()
        model.bias = torch.nn.Parameter(torch.zeros(16, device="cuda"))
        optimizer = apex.optimizers.FusedAdam(
            model.parameters(), lr=1e-4, capturable=True, master_weights=True
        )
        return model, optimizer

    def step(self, model, optimizer, iteration):
        torch.manual_seed(iteration)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()

    def trained(self, dtype=torch.float16):
        model, optimizer = self.make(0, dtype)
        for iteration in range(3):
            self.step(model, optimizer, iteration)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        return model, optimizer, *saved

    def assert_same_steps(self, model, optimizer, resumed, resumed_optimizer):
        for iteration in range(3, 5):
            self.step(model, optimizer, iteration)
            self.step(resumed, resumed_optimizer, iteration)
            for p, q in zip(model.parameters(), resumed.parameters()):
                torch.testing.assert_close(p, q, rtol=0, atol=0)

    def test_resume(self):
        for order in ("model first", "optimizer first"):
            for dtype in (torch.float16, torch.bfloat16):
                model, optimizer, weights, state = self.trained(dtype)
                resumed, resumed_optimizer = self.make(1, dtype)
                if order == "model first":
                    resumed.load_state_dict(weights)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    resumed_optimizer.load_state_dict(state)
                if order == "optimizer first":
                    resumed.load_state_dict(weights)
                self.assert_same_steps(model, optimizer, resumed, resumed_optimizer)

    def test_moments_are_loaded_in_fp32(self):
        model, optimizer, _, state = self.trained()
        resumed, resumed_optimizer = self.make(1)
        resumed_optimizer.load_state_dict(state)
        for p, q in zip(model.parameters(), resumed.parameters()):
            self.assertEqual(resumed_optimizer.state[q].keys(), {"exp_avg", "exp_avg_sq"})
            for name, moment in resumed_optimizer.state[q].items():
                self.assertEqual(moment.dtype, torch.float32)
                torch.testing.assert_close(moment, optimizer.state[p][name], rtol=0, atol=0)

    def test_state_without_masters(self):
        model, _, weights, state = self.trained()
        for of_param in state["state"].values():
            of_param.pop("master_param", None)
        resumed, resumed_optimizer = self.make(1)
        with self.assertWarnsRegex(UserWarning, "no FP32 master weights of 1 parameters"):
            resumed_optimizer.load_state_dict(state)
        resumed.load_state_dict(weights)
        self.step(resumed, resumed_optimizer, 3)
        for p, q in zip(model.parameters(), resumed.parameters()):
            self.assertLess((p - q).abs().max(), 2e-3)

    def test_masters_of_other_weights(self):
        _, _, _, state = self.trained()
        resumed, resumed_optimizer = self.make(1)
        before = copy.deepcopy(resumed.state_dict())
        resumed_optimizer.load_state_dict(state)
        for _ in range(2):
            with self.assertRaisesRegex(RuntimeError, "found 2 of 2 parameters with others"):
                self.step(resumed, resumed_optimizer, 3)
        torch.testing.assert_close(resumed.state_dict(), before, rtol=0, atol=0)


if __name__ == "__main__":
    unittest.main()
