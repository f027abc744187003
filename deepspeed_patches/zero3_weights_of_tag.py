"""Load the weights of the requested tag, not of the latest one, at ZeRO-3 without optimizer states.

https://github.com/deepspeedai/DeepSpeed/issues/8499
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

ENGINE = "deepspeed.runtime.engine"

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/issues/8499",
        "https://github.com/deepspeedai/DeepSpeed/pull/8501",
    ),
    symptom="`load_checkpoint(tag=…)` loads the weights of the latest checkpoint",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="ZeRO 3 with `load_optimizer_states=False`",
    silent=True,
    test="tests/unit/checkpoint/test_zero3_weights_of_tag.py",
)

WITHOUT_TAG = "get_fp32_state_dict_from_zero_checkpoint(load_dir)"
WITH_TAG = "get_fp32_state_dict_from_zero_checkpoint(load_dir, tag=str(tag))"
STAGE_3 = "self.zero_optimization_partition_weights()"
NOT_UNIVERSAL = "not self.load_universal_checkpoint()"


@fix.edit(ENGINE)
def read_the_checkpoint_of_the_tag(source: Source) -> None:
    """Upstream's script uses the tag in `latest`. A universal checkpoint has no files for it, and is skipped."""
    load = source.function("DeepSpeedEngine._load_checkpoint")
    test = source.branch_around("get_fp32_state_dict_from_zero_checkpoint(...)", within=load).test
    source.skip_if((WITH_TAG, load), NOT_UNIVERSAL, within=test)
    source.replace(source.one(WITHOUT_TAG, within=load), WITH_TAG)
    stage_3 = source.one(STAGE_3, within=test)
    source.insert_at(stage_3, "(")
    source.insert_at(stage_3, f" and {NOT_UNIVERSAL}\n{' ' * 15}", end=True)
    source.insert_at(test, ")", end=True)
