# Copyright (c) 2025, NVIDIA CORPORATION. All rights reserved.

import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

STATES = ("param", "exp_avg", "exp_avg_sq")
BUCKETS = 3
NUMEL = 1000  # of a bucket
PADDED_NUMEL = 1024
SHARD_BYTES = 4 * PADDED_NUMEL


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made under it, and alive at the same time."""

    def __init__(self):
        super().__init__()
        self.storages = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        given = {self._storage(tensor)._cdata for tensor in self._tensors((args, kwargs))}
        for tensor in self._tensors(outputs):
            storage = self._storage(tensor)
            if storage._cdata not in given:
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        live = sum(size for reference, size in self.storages.values() if not reference.expired())
        self.peak = max(self.peak, live)
        return outputs

    @staticmethod
    def _tensors(tree):
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

    @staticmethod
    def _storage(tensor):
        return tensor.untyped_storage()


@pytest.fixture(autouse=True)
def released_tensors(monkeypatch):
    """Let collectives return only once Gloo has let go of the tensors that they were given."""

    def released(collective):
        def call(*args, **kwargs):
            aliases = []

            def alias(tensor):
                aliases.append(tensor.detach())
                return aliases[-1]

            collective(*tree_map_only(torch.Tensor, alias, args), **kwargs)
            references = [weakref.ref(alias) for alias in aliases]
            aliases.clear()
            while any(reference() is not None for reference in references):
                time.sleep(0.001)

        return call

    for name in ("gather", "scatter"):
        monkeypatch.setattr(torch.distributed, name, released(getattr(torch.distributed, name)))


@pytest.fixture
def group(tmp_path):
    """A Gloo group of this process alone."""
    if torch.distributed.is_initialized():
        ranks = [[rank] for rank in range(torch.distributed.get_world_size())]
        yield torch.distributed.new_subgroups_by_enumeration(ranks, backend="gloo")[0]
        return
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture
def optimizer(group):
    """What a save and a load use of an optimizer: padded buckets of one parameter each."""
    params = [torch.nn.Parameter(torch.rand(NUMEL)) for _ in range(BUCKETS)]
    main_params = [param.detach().clone() for param in params]
    gbuf_ranges = []
    for index, param in enumerate(params):
        world = Range(index * PADDED_NUMEL, index * PADDED_NUMEL + NUMEL)
        local = Range(0, NUMEL)
        ranges = dict.fromkeys(("gbuf_world_in_bucket", "gbuf_local", "param"), local)
        gbuf_ranges.append({"param_map": {param: {"gbuf_world": world, **ranges}}})

    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
    optimizer.optimizer = torch.optim.AdamW(main_params, lr=0.1)
    optimizer.model_chunks = [torch.nn.ParameterList(params)]
    optimizer.model_param_group_index_map = {p: (0, order) for order, p in enumerate(params)}
    optimizer.gbuf_ranges = [{(torch.float32, torch.float32): gbuf_ranges}]
    bucket = SimpleNamespace(grad_data=torch.zeros(PADDED_NUMEL), numel_unpadded=NUMEL)
    buffer = SimpleNamespace(
        params=params, buckets=[bucket] * BUCKETS, numel_unpadded=BUCKETS * NUMEL
    )
    optimizer.buffers = [buffer]
    optimizer.data_parallel_group = optimizer.data_parallel_group_gloo = group
    optimizer.ddp_config = SimpleNamespace(use_custom_fsdp=False, use_megatron_fsdp=False)
    optimizer.config = SimpleNamespace(
        optimizer="adam",
        use_precision_aware_optimizer=False,
        use_precision_aware_optimizer_no_fp8_or_ds_fp8=False,
    )
    optimizer.is_stub_optimizer = False
    for param in main_params:
        param.grad = torch.rand(NUMEL)
    optimizer.optimizer.step()
    for state in optimizer.optimizer.state.values():
        del state["step"]  # FusedAdam has it in the param group
    return optimizer


def _states(optimizer):
    """The state of all parameters, as a save lays it out."""
    params = optimizer.optimizer.param_groups[0]["params"]
    states = [{"param": param, **optimizer.optimizer.state[param]} for param in params]
    return {key: torch.cat([state[key] for state in states]) for key in STATES}


def _gathered(optimizer):
    (tensors,) = optimizer.get_parameter_state_dp_zero()[0].values()
    return tensors


def test_gather_needs_no_more_than_a_shard_beside_the_state(optimizer):
    with PeakBytes() as memory:
        tensors = _gathered(optimizer)
    gathered_bytes = sum(tensors[key].untyped_storage().nbytes() for key in STATES)
    assert gathered_bytes == 4 * len(STATES) * BUCKETS * NUMEL
    assert memory.peak <= gathered_bytes + SHARD_BYTES


def test_gathered_state_is_that_of_the_parameters(optimizer):
    tensors = _gathered(optimizer)
    assert list(tensors) == [*STATES, "numel_unpadded"]
    assert tensors["numel_unpadded"] == BUCKETS * NUMEL
    for key, expected in _states(optimizer).items():
        assert torch.equal(tensors[key], expected)


def test_scatter_needs_no_more_than_a_bucket(optimizer):
    state = optimizer.get_parameter_state_dp_zero()
    with PeakBytes() as memory:
        optimizer.load_parameter_state_from_dp_zero(state)
    # All states of a bucket, and the shard that is padded, of one state and of the one before it.
    assert memory.peak <= (len(STATES) + 2) * SHARD_BYTES


def test_scattered_state_is_that_of_the_checkpoint(optimizer):
    state, expected = optimizer.get_parameter_state_dp_zero(), _states(optimizer)
    for param, moments in optimizer.optimizer.state.items():
        for tensor in (param, *moments.values()):
            tensor.zero_()
    optimizer.load_parameter_state_from_dp_zero(state)
    loaded = _states(optimizer)
    assert all(torch.equal(loaded[key], expected[key]) for key in STATES)
