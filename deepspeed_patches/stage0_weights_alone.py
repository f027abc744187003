"""Refresh the fp32 parameters from the loaded weights if no optimizer states are loaded, without ZeRO.

https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py#L4680
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

ENGINE = "deepspeed.runtime.engine"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py#L4680",),
    symptom="the first step after the load puts the initial weights back",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="fp16 or bf16 without ZeRO, `load_optimizer_states=False`",
    silent=True,
    test="tests/unit/checkpoint/test_stage0_weights_alone.py",
)

SCHEDULE = "load_lr_scheduler_states and self.lr_scheduler is not None"
REFRESH = """
if not load_optimizer_states and not self.zero_optimization():
    if hasattr(self.optimizer, 'refresh_fp32_params'):
        self.optimizer.refresh_fp32_params()  # else the next step would undo the load
"""


@fix.edit(ENGINE)
def make_masters_of_the_loaded_weights(source: Source) -> None:
    """Upstream does so only for `load_module_only`; with ZeRO this happens after the method."""
    load = source.function("DeepSpeedEngine._load_checkpoint")
    source.skip_if(REFRESH, within=load)
    source.insert_before(source.branch(SCHEDULE, within=load), REFRESH)
