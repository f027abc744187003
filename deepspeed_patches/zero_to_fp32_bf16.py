"""Let zero_to_fp32 read checkpoints of BF16_Optimizer, which contain no ZeRO stage.

https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/utils/zero_to_fp32.py#L210
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from shutil import copyfile

ENGINE = "deepspeed.runtime.engine"
SCRIPT = "deepspeed.utils.zero_to_fp32"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/utils/zero_to_fp32.py#L210",),
    symptom="`zero_to_fp32`: `… is not a zero checkpoint`",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="bf16, ZeRO 1, fp32 gradient accumulation",
    silent=False,
    test="tests/unit/checkpoint/test_zero_to_fp32_bf16.py",
)

STATES = "optimizer_states = state_dicts[0][OPTIMIZER_STATE_DICT]"
NOT_NAMED = (
    "ZERO_STAGE not in state_dicts[0][OPTIMIZER_STATE_DICT]",
    "not ZERO_STAGE in state_dicts[0][OPTIMIZER_STATE_DICT]",  # up to 0.17
)
NOT_OF_ZERO = "ZERO_STAGE not in optimizer_states and SINGLE_PARTITION_OF_FP32_GROUPS not in optimizer_states"
STAGE = "zero_stage = state_dicts[0][OPTIMIZER_STATE_DICT][ZERO_STAGE]"
STAGE_OR_1 = "zero_stage = optimizer_states.get(ZERO_STAGE, 1)"
WHY = "# BF16_Optimizer stores no stage; its files have the layout of stage 1"
COPY, COPY_AS_LOADED = "copyfile(src, dst)", "_copy_as_loaded(src, dst)"


def _copy_as_loaded(src: str, dst: str) -> None:
    """Copy a deepspeed.utils script as this process has loaded it: an import hook may change it."""
    import sys

    name = os.path.splitext(os.path.basename(src))[0]
    module = sys.modules.get(f"deepspeed.utils.{name}")
    get_data = getattr(getattr(module, "__loader__", None), "get_data", None)
    if module is None or module.__file__ is None or get_data is None:
        copyfile(src, dst)
        return
    with open(f"{dst}.tmp", "wb") as file:
        file.write(get_data(module.__file__))
    os.replace(f"{dst}.tmp", dst)


@fix.edit(SCRIPT)
def take_files_without_a_stage(source: Source) -> None:
    """Files with and without a stage have the main parameters under the same name, partitioned alike."""
    parse = source.function("parse_optim_states")
    source.skip_if(STATES, NOT_OF_ZERO, STAGE_OR_1, within=parse)
    branch = source.branch(source.first_there(*NOT_NAMED, within=parse), within=parse)
    source.insert_before(branch, STATES)
    source.replace(branch.test, NOT_OF_ZERO)
    source.replace(source.one(STAGE, within=parse), f"{WHY}\n{STAGE_OR_1}")


@fix.edit(ENGINE, independent=True, ours_alone=True)
def put_the_fixed_script_into_the_checkpoint(source: Source) -> None:
    """Upstream copies the file on disk, which the import hook does not change."""
    copy = source.function("DeepSpeedEngine._copy_recovery_script")
    source.skip_if(COPY_AS_LOADED, _copy_as_loaded, within=copy)
    source.replace(source.one(COPY, within=copy), COPY_AS_LOADED)
    source.insert_function_before("DeepSpeedEngine", _copy_as_loaded)
