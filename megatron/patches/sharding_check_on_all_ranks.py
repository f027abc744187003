"""Refuse a wrongly sharded state dict on all ranks, and say what to do if a layer is frozen.

https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.2/megatron/core/dist_checkpointing/validation.py
"""

from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.2/megatron/core/dist_checkpointing/validation.py",
    ),
    symptom="`Invalid access pattern for ShardedTensor(key='optimizer.state` on rank 0, the other ranks wait",
    releases=(("0.12.0", newest("megatron-core")),),
    stacks="distributed optimizer, `fully_reshardable`: a frozen layer beside trained ones",
    silent=False,
    test="tests/unit_tests/dist_checkpointing/test_sharding_check_on_all_ranks.py",
)

ONLY_RANK_0 = "torch.distributed.get_rank() != 0"
MESSAGE = "f'Invalid access pattern for {rank_sharding[0][1]}: {shard_access_cnt}'"
HINT = "_hint_about_frozen_layers(rank_sharding[0][1].key, shard_access_cnt)"


def _hint_about_frozen_layers(key: "str", accesses: "Any") -> "str":
    """Return what to do if the optimizer has no state of some layers of a stack.

    Args:
        key: the sharded tensor's key.
        accesses: how often each of its shards would be saved.
    """
    if "optimizer.state." not in key or accesses.min() > 0:
        return ""
    return (
        "\nExpected optimizer state of each layer, found none of some: are they frozen? Then save"
        " the optimizer in dp_reshardable (leave out --dist-ckpt-optim-fully-reshardable)."
    )


@fix.edit("megatron.core.dist_checkpointing.validation")
def check_on_all_ranks(source: Source) -> None:
    """All ranks have what the check needs. If only rank 0 raises, the others wait in the next collective."""
    check = source.function("validate_sharding_integrity")
    of_key = source.function("_validate_sharding_for_key")
    source.skip_if(
        (HINT, of_key), not source.has(ONLY_RANK_0, within=check), _hint_about_frozen_layers
    )
    source.remove(source.branch(ONLY_RANK_0, within=check))
    message = source.one(MESSAGE, within=of_key)
    source.replace(message, f"{source.text(message)}\n+ {HINT}")
    source.insert_function_before(of_key, _hint_about_frozen_layers)
