"""Convert ZeRO-3 checkpoints to universal without padding: ranks past a parameter's end hold no data of it.

https://github.com/deepspeedai/DeepSpeed/pull/8060
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NotNeeded, Source

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/8060",),
    symptom="`ds_to_universal` writes padding as part of the parameters",
    releases=(("0.15.0", "0.19.2"),),
    stacks="ZeRO 3",
    silent=True,
    test="tests/unit/checkpoint/test_zero3_fragment_bounds.py",
)


@fix.edit("deepspeed.checkpoint.ds_to_universal")
def count_no_negative_elements(source: Source) -> None:
    """4096 elements on 768 ranks are 6 per rank. Rank 683 starts at 4098: -2 elements, which `abs` turns into 2."""
    extract = source.function("extract_zero_shards_stage3")
    bounded = ("padding_free_numel = max(0, min(...))", "padding_free_numel = min(..., max(0, ...))")
    if any(source.all(pattern, within=extract) for pattern in bounded):
        raise NotNeeded
    length = source.one("abs(unpartitioned_numel - dp_index * partitioned_numel)", within=extract)
    source.replace(length.func, "max")
    source.insert_at(length.args[0], "0, ")
