# Owner(s): ["oncall: distributed checkpointing"]

import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.testing._internal.common_utils import run_tests, TestCase


class TestEmptyGroup(TestCase):
    def test_settings_of_a_group_without_parameters(self):
        for position in range(3):
            model = torch.nn.Linear(4, 4)
            groups = [{"params": [param]} for param in model.parameters()]
            groups.insert(position, {"params": [], "weight_decay": 0.5})
            optim = torch.optim.AdamW(groups)
            state_dict = get_optimizer_state_dict(model, optim)
            set_optimizer_state_dict(model, optim, state_dict)
            self.assertEqual(optim.param_groups[position].get("weight_decay"), 0.5)
            self.assertEqual(
                [len(group["params"]) for group in optim.param_groups].count(0), 1
            )


if __name__ == "__main__":
    run_tests()
