"""Save buckets in which a rank holds only padding, or whose last gap exceeds the saved range.

https://github.com/NVIDIA/Megatron-LM/issues/5898
"""

from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Function, Source

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
ALL = "gbuf_saved_numel = gbuf_local_numel"
UNPADDED = """gbuf_saved_numel = min(
    gbuf_local_numel,
    gbuf_world_numel_unpadded - data_parallel_rank * gbuf_local_numel,
)"""
PADDING = """if not bucket_state:
    if gbuf_saved_numel <= 0:
        continue
    padding = {
        key: torch.zeros(gbuf_saved_numel, dtype=dtype, device=device)
        for key, (dtype, device) in states_of_padding.items()
    }
    bucket_state.append({**padding, "padding": True})
    bucket_state[0].update(gbuf_local_start=0, gbuf_local_end=gbuf_saved_numel)"""
OF_PADDING = "states_of_padding = self._states_of_padding()"
CLIPPED = "next_param_start = gbuf_saved_numel"
SAVED = "state[gbuf_idx][dtype] = list(filter(None, gbuf_range_map_for_all_buckets))"
WITHOUT_EMPTY = f"""# A local checkpoint would keep an empty list in its common part, and then not load.
{SAVED}"""
LOADED = "loaded_shards = iter(state_dict.get(gbuf_idx, {}).get(dtype, []))"
IS_SAVED = """# Checkpoints do not have the empty list of a shard beyond the saved range.
bucket = self.buffers[gbuf_idx].buckets[bucket_idx]
shard_start = bucket.grad_data.numel() // self.data_parallel_group.size()
shard_start *= self.data_parallel_group.rank()
is_saved = shard_start < bucket.numel_unpadded"""
SHARD = "bucket_state = next(loaded_shards) if is_saved else []"


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


@fix.edit("megatron.core.optimizer.distrib_optimizer")
def save_shards_of_padding(source: Source) -> None:
    """Upstream asserts that no such shard exists, and lets a shard's last gap exceed the bucket's saved end."""
    save, _ = _methods(source)
    is_cut = source.has("gbuf_world_numel_unpadded", within=save)
    saved, cut = (UNPADDED, [CLIPPED, SAVED]) if is_cut else (ALL, [])
    method = DistributedOptimizer._states_of_padding
    source.skip_if(saved, PADDING, *cut, OF_PADDING, method, within=save)
    empty = source.one("assert bucket_state, 'empty bucket encountered'", within=save)
    source.replace(empty, f"{saved}\n{PADDING}")
    if is_cut:
        source.replace(source.one("next_param_start = gbuf_local_numel", within=save), CLIPPED)
        source.insert_after(source.loop("bucket_idx, bucket_state", within=save), WITHOUT_EMPTY)
    states = tuple(f"state = self.get_parameter_state_{name}()" for name in NAMES)
    first = source.one(source.first_there(*states, within=save), within=save)
    source.insert_before(first, OF_PADDING)
    source.insert_method_before(save, method)


@fix.edit(
    "megatron.core.optimizer.distrib_optimizer", releases=(("0.15.0", newest("megatron-core")),)
)
def load_with_empty_shards(source: Source) -> None:
    """Without the empty lists, all lists that follow a missing one would move to the wrong bucket."""
    save, load = _methods(source)
    # Else padding is saved, and no list is empty.
    source.some("gbuf_world_numel_unpadded", within=save)
    source.skip_if(LOADED, SHARD, within=load)
    buckets = source.loop("bucket_idx, gbuf_range_map", within=load)
    source.insert_before(buckets, LOADED)
    shard = source.one("bucket_state = state_dict[gbuf_idx][dtype][bucket_idx]", within=buckets)
    source.replace(shard, f"{IS_SAVED}\n{SHARD}")


def _methods(source: Source) -> "tuple[Function, Function]":
    """The methods that save and load the format. Raises NoMatch."""
    save, load = "sharded_param_state", "load_parameter_state_from"
    names = (name for name in NAMES if source.has_function(f"DistributedOptimizer.{save}_{name}"))
    name = next(names, NAMES[-1])
    return (
        source.function(f"DistributedOptimizer.{save}_{name}"),
        source.function(f"DistributedOptimizer.{load}_{name}"),
    )
