# Owner(s): ["oncall: distributed checkpointing"]

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.testing._internal.common_utils import run_tests, TestCase


class TestTouchedState(TestCase):
    def test_states_that_were_looked_at_are_created(self):
        """`optim.state` is a defaultdict: to look up a state makes an empty one."""
        model = torch.nn.Linear(4, 4)
        optim = torch.optim.AdamW(model.parameters())
        expected = get_optimizer_state_dict(
            model, torch.optim.AdamW(model.parameters())
        )
        for param in model.parameters():
            self.assertEqual(optim.state[param], {})
        found = get_optimizer_state_dict(model, optim)
        self.assertEqual(found["state"].keys(), expected["state"].keys())
        self.assertEqual(
            found["state"]["weight"].keys(), expected["state"]["weight"].keys()
        )


if __name__ == "__main__":
    run_tests()
