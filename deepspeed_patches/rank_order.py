"""Sort the ranks' files and fragments by rank number, not by name: rank 9 before rank 10.

https://github.com/deepspeedai/DeepSpeed/pull/5342
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import AlreadyThere, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/pull/5342",
        "https://github.com/deepspeedai/DeepSpeed/pull/5395",
    ),
    symptom="`ds_to_universal` joins the ranks' data in the wrong order",
    releases=(("0.12.0", "0.14.1"),),
    stacks="more than 10 ranks; in 0.14.1 more than 100",
    silent=True,
    test="tests/unit/checkpoint/test_rank_order.py",
)

RANK_OF_FRAGMENT = "lambda path: int(path.rpartition('.')[2])"


def _ranks_in_name(path: str) -> "list[int]":
    """Return the data- and model-parallel ranks in the name of a rank's file."""
    return [int(part) for part in os.path.basename(path).split("_") if part.isdigit()]


@fix.edit("deepspeed.checkpoint.reshape_utils", independent=True)
def sort_files_by_rank(source: Source) -> None:
    """Upstream sorts by name, and reads rank 10's file as rank 1's."""
    get = source.function("get_zero_files")
    if source.has("sort_zero_files(...)", within=get):
        raise AlreadyThere
    by_rank = f"sorted(zero_files, key={_ranks_in_name.__name__})"
    source.check_parts(
        {**source.functions_there("", _ranks_in_name), by_rank: source.has(f"return {by_rank}", within=get)}
    )
    source.replace(source.one("return zero_files", within=get).value, by_rank)
    source.insert_function_before(get, _ranks_in_name)


@fix.edit("deepspeed.checkpoint.ds_to_universal", independent=True)
def join_fragments_by_rank(source: Source) -> None:
    """Upstream writes fp32.00 to fp32.99 and fp32.100, and joins fp32.100 after fp32.10."""
    merge = source.function("_merge_zero_shards")
    if source.has("sorted(list(dp_indices))", within=merge):
        raise AlreadyThere
    by_name = 'sorted(list(glob.glob(f"{prefix_path}.*")))'
    if source.has(f"{by_name[:-1]}, key={RANK_OF_FRAGMENT})", within=merge):
        raise AlreadyThere
    source.add_keyword(source.one(by_name, within=merge), "key", RANK_OF_FRAGMENT)
