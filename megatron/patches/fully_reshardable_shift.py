"""Save `fully_reshardable` states at their correct offsets.

https://github.com/NVIDIA/Megatron-LM/pull/5077
"""

import ast
from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NoMatch, NotNeeded, Source

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/Megatron-LM/pull/5077",),
    symptom="the loss is worse after a resume: states are saved shifted",
    releases=(("0.15.0", newest("megatron-core")),),
    stacks="fully_reshardable format, several buckets",
    silent=True,
    test="tests/unit_tests/dist_checkpointing/test_fully_reshardable_shift.py",
)


SAVE = "DistributedOptimizer.sharded_param_state_fully_reshardable"
# Parts of upstream's own fix (#5077), not in any release up to 0.19.2.
REPAIR = (
    "adjusted_start = param_world_start - padding_adjustment",
    "adjusted_end = param_world_end - padding_adjustment",
    "bucket_padding = bucket.grad_data.numel() - bucket.numel_unpadded",
)
ENDS = ("param_world_start", "param_world_end")
BUCKET = "bucket_id"
PADDING = f"end_padding[{BUCKET}]"
ALL_THERE = """assert missing_elems_num == 0, (
    f"expected the gathered {state_key} of '{sharded_metadata.key}' at"
    f" [{param_world_start}, {param_world_end}), found {missing_elems_num}"
    " elements less"
)"""


def _end_padding_before_buckets(buffer: Any) -> "list[int]":
    """Return the end padding before each bucket of a buffer, in elements.

    Buckets are padded so that they divide evenly among the ranks. `param_index_map` counts this
    padding, but states gathered from the ranks do not contain it.
    """
    found = [0]
    for bucket in buffer.buckets:
        found.append(found[-1] + bucket.grad_data.numel() - bucket.numel_unpadded)
    return found


@fix.edit("megatron.core.optimizer.distrib_optimizer")
def cut_without_end_padding(source: Source) -> None:
    """Upstream slices states without end padding by ranges that include it, and fills the gaps with zeros."""
    save = source.function(SAVE)
    if _is_repaired(source):
        raise NotNeeded
    source.one(
        "state_ten = world_tensors[state_key][param_world_start:param_world_end]", within=save
    )
    loop = source.loop(f"model_param, ({', '.join(ENDS)}, ...)", within=save)
    bucket = _bucket(source, loop)
    lines = (
        "end_padding = _end_padding_before_buckets(buffer)",
        *(f"{end} -= {PADDING}" for end in ENDS),
    )
    is_named = source.text(bucket) == BUCKET
    source.skip_if(ALL_THERE, *lines, is_named, _end_padding_before_buckets, within=save)
    source.replace(bucket, BUCKET)
    source.insert_before(loop, lines[0])
    comment = "# What is gathered has no end padding of buckets, which these ranges include."
    source.insert_before(loop.body[0], "\n".join([comment, *lines[1:]]))
    source.replace(source.branch("missing_elems_num > 0", within=loop), ALL_THERE)
    source.insert_function_before("DistributedOptimizer", _end_padding_before_buckets)


def _is_repaired(source: Source) -> bool:
    """Whether upstream's own fix is there."""
    save = source.function(SAVE)
    return all(source.has(part, within=save) for part in REPAIR)


def _bucket(source: Source, loop: ast.For) -> ast.expr:
    """The loop variable for the bucket index of a buffer's parameter: `_` before this fix. Raises NoMatch."""
    assert isinstance(loop.target, ast.Tuple)
    assert isinstance(loop.target.elts[1], ast.Tuple)
    bucket = loop.target.elts[1].elts[-1]
    if source.text(loop.iter) != "buffer.param_index_map.items()" or source.text(bucket) not in (
        "_",
        BUCKET,
    ):
        raise NoMatch(
            f"expected {', '.join(ENDS)}, _ in a loop over `buffer.param_index_map.items()`"
        )
    return bucket
