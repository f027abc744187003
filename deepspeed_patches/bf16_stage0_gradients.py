"""Clear the gradients after each step in bf16 without ZeRO.

https://github.com/deepspeedai/DeepSpeed/pull/7839
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import AlreadyThere, NotConcerned, Source

ENGINE = "deepspeed.runtime.engine"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/7839",),
    symptom="each step uses the gradients of all steps before; a resume goes on without",
    releases=(("0.17.6", "0.18.5"),),
    stacks="bf16 without ZeRO",
    silent=True,
    stages=("model states",),
    test="tests/unit/checkpoint/test_bf16_stage0_gradients.py",
)

CLEARS_WITH_ZERO = 'self.zero_optimization() and hasattr(self.optimizer, "zero_grad")'
CLEARS = 'hasattr(self.optimizer, "zero_grad")'


@fix.edit(ENGINE)
def clear_gradients_without_zero_too(source: Source) -> None:
    """Else each step has the gradients of all steps since the start of the run, which no checkpoint holds."""
    if b"DDP_BFLOAT16" not in source.data:
        raise NotConcerned  # by the text alone, as the engine takes long to parse; up to 0.17.5 BF16_Optimizer does it
    step = source.function("DeepSpeedEngine._take_model_step")
    if not source.has(CLEARS_WITH_ZERO, within=step) and source.has(CLEARS, within=step):
        raise AlreadyThere
    source.replace(source.one(CLEARS_WITH_ZERO, within=step), CLEARS)
