"""Save buckets in which a rank holds only padding, or whose last gap exceeds the saved range.

More than 150 lines: the format has two names, and saves two ranges of a shard since 0.12.

https://github.com/NVIDIA/Megatron-LM/issues/5898
"""

from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Function, NoMatch, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/issues/5898",
        "https://github.com/NVIDIA/Megatron-LM/issues/6191",
    ),
    symptom="a save fails with `empty bucket encountered` or `out of bounds chunk`",
    releases=(("0.12.0", newest("megatron-core")),),
    stacks="dp_reshardable format, distributed optimizer",
    silent=False,
    test="tests/unit_tests/dist_checkpointing/test_reshardable_padding_save.py",
)

# The format's name up to 0.14, and its name since.
NAMES = ("fs_bucket_space", "dp_reshardable")
# The saved elements of a shard: all up to 0.14, since then those before the bucket's end padding.
ALL = """bucket_state.extend(
    self._padding_of_shard(gbuf_local_numel, states_of_padding)
)"""
UNPADDED = """bucket_state.extend(
    self._padding_of_shard(
        min(
            gbuf_local_numel,
            gbuf_world_numel_unpadded
            - data_parallel_rank * gbuf_local_numel,
        ),
        states_of_padding,
    )
)"""
OF_PADDING = "states_of_padding = self._states_of_padding()"
CLIPPED = """next_param_start = min(
    gbuf_local_numel,
    gbuf_world_numel_unpadded - data_parallel_rank * gbuf_local_numel,
)"""
WITH_EMPTY_SHARDS = """buckets_state = self._with_empty_shards(
    gbuf_idx, state_dict.get(gbuf_idx, {}).get(dtype, [])
)"""


class DistributedOptimizer:
    """The methods to insert into upstream's class."""

    if TYPE_CHECKING:
        buffers: list[Any]
        data_parallel_group: torch.distributed.ProcessGroup
        model_param_group_index_map: dict[torch.nn.Parameter, tuple[int, int]]

        _get_main_param_and_optimizer_states: Any

    def _states_of_padding(self) -> "dict[str, tuple[torch.dtype, str]]":
        """Return the dtype and the device type of each saved state, by name.

        A rank that owns no parameter gets them from the others. All ranks can tell from the buffer
        layout whether such a rank exists.
        """
        owned = next(iter(self.model_param_group_index_map), None)
        states = self._get_main_param_and_optimizer_states(owned) if owned is not None else {}
        own = {
            key: (state.dtype, state.device.type)
            for key, state in states.items()
            if isinstance(state, torch.Tensor) and key != "step"
        }
        size = self.data_parallel_group.size()
        owners: set[int] = set()
        for buffer in self.buffers:
            for start, end, bucket_id in buffer.param_index_map.values():
                bucket = buffer.buckets[bucket_id]
                numel = bucket.grad_data.numel() // size
                first, last = ((at - bucket.offset) // numel for at in (start, end - 1))
                owners.update(range(first, last + 1))
        if len(owners) == size:
            return own
        of_ranks = [own] * size
        torch.distributed.all_gather_object(of_ranks, own, group=self.data_parallel_group)
        return next((found for found in of_ranks if found), own)

    def _padding_of_shard(
        self, numel: int, states: "dict[str, tuple[torch.dtype, str]]"
    ) -> "list[dict[str, Any]]":
        """Return the saved form of a shard that contains only padding, as a list of one entry.

        Its states have the names and dtypes of any parameter's states.
        The list is empty if the shard is beyond the saved range (`numel` of 0 or less).
        """
        if numel <= 0:
            return []
        padding = {
            key: torch.zeros(numel, dtype=dtype, device=device)
            for key, (dtype, device) in states.items()
        }
        return [{**padding, "gbuf_local_start": 0, "gbuf_local_end": numel, "padding": True}]

    def _with_empty_shards(
        self, gbuf_idx: int, buckets_state: "list[list[Any]]"
    ) -> "list[list[Any]]":
        """Return a buffer's loaded buckets, with empty lists where this rank has no data.

        Checkpoints do not preserve the empty lists of a state dict.
        """
        rank, size = self.data_parallel_group.rank(), self.data_parallel_group.size()
        found = iter(buckets_state)
        return [
            next(found) if rank * (bucket.grad_data.numel() // size) < bucket.numel_unpadded else []
            for bucket in self.buffers[gbuf_idx].buckets
        ]


@fix.edit("megatron.core.optimizer.distrib_optimizer")
def save_shards_of_padding(source: Source) -> None:
    """Upstream asserts that no such shard exists, and lets a shard's last gap exceed the bucket's saved end."""
    save, _ = _methods(source)
    unpadded = source.has("gbuf_world_numel_unpadded", within=save)
    call = UNPADDED if unpadded else ALL
    methods = (DistributedOptimizer._states_of_padding, DistributedOptimizer._padding_of_shard)
    source.skip_if(call, OF_PADDING, *([CLIPPED] if unpadded else []), *methods, within=save)
    empty = source.one("assert bucket_state, 'empty bucket encountered'", within=save)
    padding = "    " + call.replace("\n", "\n    ")
    source.replace(empty, f"if not bucket_state:\n{padding}\nif not bucket_state:\n    continue")
    if unpadded:
        source.replace(source.one("next_param_start = gbuf_local_numel", within=save), CLIPPED)
    states = tuple(f"state = self.get_parameter_state_{name}()" for name in NAMES)
    first = source.one(source.first_there(*states, within=save), within=save)
    source.insert_before(first, OF_PADDING)
    for method in methods:
        source.insert_method_before(save, method)


@fix.edit(
    "megatron.core.optimizer.distrib_optimizer", releases=(("0.15.0", newest("megatron-core")),)
)
def load_with_empty_shards(source: Source) -> None:
    """Without the empty lists, all lists that follow a missing one would move to the wrong bucket."""
    save, load = _methods(source)
    source.some(
        "gbuf_world_numel_unpadded", within=save
    )  # else padding is saved, and no list is empty
    method = DistributedOptimizer._with_empty_shards
    source.skip_if(
        WITH_EMPTY_SHARDS, "bucket_state = buckets_state[bucket_idx]", method, within=load
    )
    buckets = source.loop("bucket_idx, gbuf_range_map", within=load)
    source.insert_before(buckets, WITH_EMPTY_SHARDS)
    source.replace(
        source.one("state_dict[gbuf_idx][dtype][bucket_idx]", within=buckets),
        "buckets_state[bucket_idx]",
    )
    source.insert_method_before(load, method)


def _methods(source: Source) -> "tuple[Function, Function]":
    """The methods that save and load the format. Raises NoMatch."""
    for name in NAMES:
        save, load = (
            f"DistributedOptimizer.{prefix}_{name}"
            for prefix in ("sharded_param_state", "load_parameter_state_from")
        )
        if source.has_function(save):
            break
    else:
        raise NoMatch("expected a method that saves the optimizer's state in buckets, found none")
    return source.function(save), source.function(load)
