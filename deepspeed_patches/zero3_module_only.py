"""Load the weights at ZeRO-3 with `load_module_only=True`.

https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py#L4612
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

ENGINE = "deepspeed.runtime.engine"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py#L4612",),
    symptom="`load_module_only=True` loads no weights and returns the checkpoint's path",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="ZeRO 3 with `load_module_only=True`",
    silent=True,
    depends_on=("zero3_weights_of_tag",),
    test="tests/unit/checkpoint/test_zero3_module_only.py",
)

UPSTREAMS = "not load_optimizer_states"
NAME = "without_optimizer_states"
WITHOUT = f"{NAME} = load_module_only or not load_optimizer_states"


@fix.edit(ENGINE)
def put_the_weights_together(source: Source) -> None:
    """The model's file has placeholders. Upstream reads the ranks' files only if `load_optimizer_states` is false."""
    load = source.function("DeepSpeedEngine._load_checkpoint")
    branch = source.branch_around("get_fp32_state_dict_from_zero_checkpoint(...)", within=load)
    source.skip_if((WITHOUT, load), NAME, within=branch.test)
    source.insert_before(branch, WITHOUT)
    source.replace(source.one(UPSTREAMS, within=branch.test), NAME)
