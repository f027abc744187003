"""Clear the gradients after each step in bf16 without ZeRO.

https://github.com/deepspeedai/DeepSpeed/pull/7839
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NotNeeded, Source

ENGINE = "deepspeed.runtime.engine"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/7839",),
    symptom="each step uses the gradients of all steps before; a resume continues without",
    releases=(("0.17.6", "0.18.5"),),
    stacks="bf16 without ZeRO",
    silent=True,
)

CLEARS_WITH_ZERO = 'self.zero_optimization() and hasattr(self.optimizer, "zero_grad")'
CLEARS = 'hasattr(self.optimizer, "zero_grad")'


@fix.edit(ENGINE)
def clear_gradients_without_zero_too(source: Source) -> None:
    """In upstream, gradients of all steps since the run's start add up, and no checkpoint contains them."""
    source.some("DDP_BFLOAT16")  # up to 0.17.5 BF16_Optimizer clears them
    step = source.function("DeepSpeedEngine._take_model_step")
    if not source.has(CLEARS_WITH_ZERO, within=step) and source.has(CLEARS, within=step):
        raise NotNeeded
    source.replace(source.one(CLEARS_WITH_ZERO, within=step), CLEARS)
