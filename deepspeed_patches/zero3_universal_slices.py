"""Refuse to convert ZeRO-3 checkpoints of several tensor-parallel ranks.

https://github.com/deepspeedai/DeepSpeed/blob/v0.19.3/deepspeed/checkpoint/ds_to_universal.py#L859
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NotNeeded, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    import re

CONVERTER = "deepspeed.checkpoint.ds_to_universal"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/blob/v0.19.3/deepspeed/checkpoint/ds_to_universal.py#L859",),
    symptom="the slices of tensor-parallel ranks are mixed in a universal checkpoint",
    releases=(("0.15.0", "0.19.3"),),
    stacks="conversion to universal, ZeRO 3, tensor parallelism",
    silent=True,
    test="tests/unit/checkpoint/test_zero3_universal_slices.py",
)

CALL = "_check_tensor_parallel_size_stage3(model_files)"


def _check_tensor_parallel_size_stage3(model_files: "list[str]") -> None:
    """Refuse files of several tensor-parallel ranks, which count as data-parallel ranks below."""
    names = [os.path.basename(path) for path in model_files]
    tp_size = len({match.group(1) for match in (re.search(r"mp_rank_(\d+)", name) for name in names) if match})
    if tp_size > 1:
        message = f"{os.path.dirname(model_files[0])}: found model states of {tp_size} tensor-parallel ranks, "
        raise NotImplementedError(message + "expected one: their slices cannot be converted, resume on the same ranks")


@fix.edit(CONVERTER)
def refuse_several_tensor_parallel_ranks(source: Source) -> None:
    """Upstream takes each file for the partition of another data-parallel rank. Since 0.19.4 it tells them apart."""
    if source.has_function("_build_zero3_rank_grid"):
        raise NotNeeded
    source.skip_if(CALL, _check_tensor_parallel_size_stage3)
    source.insert_before(source.one("dp_degree = len(model_files)"), CALL)
    source.insert_function_before(source.function("_check_for_required_state"), _check_tensor_parallel_size_stage3)
