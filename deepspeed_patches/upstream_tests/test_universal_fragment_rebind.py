# Copyright (c) DeepSpeed Team.
# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team

import pytest
import torch
from deepspeed.utils.tensor_fragment import get_hp_fragment_mapping, map_to_flat_opt_states

OPTIM_KEYS = ("exp_avg", "exp_avg_sq")


@pytest.fixture
def params():
    return [torch.nn.Parameter(torch.ones(numel)) for numel in (4, 3)]


@pytest.fixture
def flat_hp_tensor(params):
    """The fp32 partition of a rank that owns all of the parameters, as it is after a universal checkpoint was read."""
    flat = torch.arange(7.0)
    start = 0
    for lp in params:
        lp._hp_mapping = get_hp_fragment_mapping(lp, start, flat, {}, {}, False, 0, 0, flat.numel())
        lp._hp_mapping.optim_fragment = {key: torch.full((lp.numel(), ), 10.0 + start) for key in OPTIM_KEYS}
        start += lp.numel()
    return flat


def test_hp_fragments_stay_in_the_fp32_partition(params, flat_hp_tensor):
    map_to_flat_opt_states(flat_hp_tensor, params, {flat_hp_tensor: {}}, OPTIM_KEYS)
    for lp in params:
        lp._hp_mapping.get_hp_fragment().fill_(-1)
    assert torch.equal(flat_hp_tensor, torch.full((7, ), -1.0))


def test_optim_fragments_are_in_the_flat_states(params, flat_hp_tensor):
    optim_state = {flat_hp_tensor: {}}
    map_to_flat_opt_states(flat_hp_tensor, params, optim_state, OPTIM_KEYS)
    for key in OPTIM_KEYS:
        assert torch.equal(optim_state[flat_hp_tensor][key], torch.tensor([10.0] * 4 + [14.0] * 3))
        for lp in params:
            lp._hp_mapping.get_hp_fragment(optim_state_key=key).fill_(-1)
        assert torch.equal(optim_state[flat_hp_tensor][key], torch.full((7, ), -1.0))
