# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

from types import SimpleNamespace

import pytest
import torch
from deepspeed.checkpoint import enable_universal_checkpoint
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import get_hp_fragment_mapping

VALUES = {"fp32": 1.0, "exp_avg": 2.0, "exp_avg_sq": 3.0}
PADDED = 4


def _optimizer(cls):
    """What these optimizers have of two parameter groups, on the only rank, when they are set up."""
    optimizer = cls.__new__(cls)
    lp_groups = [[torch.nn.Parameter(torch.zeros(3))], [torch.nn.Parameter(torch.zeros(2))]]
    flat_groups = [torch.nn.Parameter(torch.zeros(PADDED)) for _ in lp_groups]
    optimizer.optimizer = torch.optim.AdamW([{"params": [flat]} for flat in flat_groups], lr=1.0)
    optimizer.bit16_groups = optimizer.bf16_groups = lp_groups
    optimizer.single_partition_of_fp32_groups = optimizer.fp32_groups_flat_partition = flat_groups
    optimizer.param_names = {}
    for i, (lp, ) in enumerate(lp_groups):
        optimizer.param_names[lp] = f"param{i}"
        lp._hp_mapping = get_hp_fragment_mapping(lp, 0, flat_groups[i], {}, {}, False, i, 0, PADDED)
        enable_universal_checkpoint([lp])
    optimizer._hp_optimizer_states_linked = False
    optimizer.mpu = SimpleNamespace(
        get_tensor_model_parallel_rank=lambda: 0,
        get_tensor_model_parallel_world_size=lambda: 1,
        get_slice_parallel_world_size=lambda: 1,
    )
    optimizer.loss_scaler = optimizer.dynamic_loss_scale = optimizer.overflow = optimizer.clip_grad = None
    optimizer.partition_gradients = True
    return optimizer


def _step(optimizer):
    """As at ZeRO stages 1 and 2: states are linked when the first group has stepped."""
    groups = optimizer.optimizer.param_groups
    for group in groups:
        group["params"][0].grad = torch.ones(PADDED)
    optimizer.optimizer.param_groups = groups[:1]
    optimizer.optimizer.step()
    optimizer._lazy_init_hp_params_optimizer_state()
    optimizer.optimizer.param_groups = groups
    optimizer.optimizer.step()


@pytest.fixture
def checkpoint_dir(tmp_path):
    for i, numel in enumerate((3, 2)):
        folder = tmp_path / "zero" / f"param{i}"
        folder.mkdir(parents=True)
        for state, value in VALUES.items():
            torch.save({"param": torch.full((numel, ), value + 10 * i)}, folder / f"{state}.pt")
    torch.save({"ds_version": "0.14.0"}, tmp_path / "zero" / "optimizer_state.pt")
    return str(tmp_path)


@pytest.mark.parametrize(("cls", "stepped"), [(DeepSpeedZeroOptimizer, False), (DeepSpeedZeroOptimizer, True),
                                              (BF16_Optimizer, False)])
def test_loads_the_states_of_every_group(cls, stepped, checkpoint_dir):
    optimizer = _optimizer(cls)
    if stepped:
        _step(optimizer)
    grads = [group["params"][0].grad for group in optimizer.optimizer.param_groups]
    optimizer._load_hp_checkpoint_state(checkpoint_dir)
    for i, group in enumerate(optimizer.optimizer.param_groups):
        (flat, ) = group["params"]
        (lp, ) = optimizer.bit16_groups[i]
        state = optimizer.optimizer.state[flat]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert flat.grad is grads[i]
        for key, value in VALUES.items():
            loaded = flat if key == "fp32" else state[key]
            assert torch.equal(loaded[:lp.numel()], torch.full((lp.numel(), ), value + 10 * i))
        if not stepped:
            assert torch.equal(flat[lp.numel():], torch.zeros(PADDED - lp.numel()))


class Engine(DeepSpeedEngine):
    """Loads a universal checkpoint of iteration 2 into an optimizer that has the states of one step."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        param = torch.nn.Parameter(torch.zeros(1))
        param.grad = torch.zeros(1)
        adam = torch.optim.Adam([param])
        adam.step()
        self.adam_state = adam.state[param]
        self.optimizer = SimpleNamespace(optimizer=adam, param_groups=adam.param_groups, update_lp_params=lambda: None)

    def load_universal_checkpoint(self):
        return True

    def zero_optimization(self):
        return True

    def zero_has_nvme_offload(self):
        return False

    def _load_checkpoint(self, *args, **kwargs):
        return "path", {"iteration": 2}

    def _load_zero_checkpoint(self, *args, **kwargs):
        return True

    def destroy(self):
        pass


def test_the_optimizer_is_at_the_step_of_the_iteration():
    engine = Engine()
    engine.load_checkpoint("folder", tag="tag")
    assert engine.adam_state["step"] == 2
