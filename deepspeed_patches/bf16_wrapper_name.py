"""Choose BF16_Optimizer for bf16 with fp32 gradient accumulation: give the two wrappers different names.

https://github.com/deepspeedai/DeepSpeed/pull/7788
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import Source

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/pull/7788",
        "https://github.com/deepspeedai/DeepSpeed/pull/7515",
    ),
    symptom="training runs without ZeRO, and no optimizer state is saved",
    releases=(("0.17.6", "0.18.4"),),
    stacks="bf16 with `grad_accum_dtype: fp32` or pipeline parallelism",
    silent=True,
)

NAME = "DDP_BFLOAT16"
SCALING = (("0.18.3", "0.18.4"),)  # releases in which each ZeRO optimizer scales losses
UNSCALED = """
# Read by the scaling of losses, which bf16 does without.
self.custom_loss_scaler = False
self.external_loss_scale = None
self.torch_autocast_gradscaler = None
"""
SCALED = "self.loss_scaler.scale_loss(value)"
HAS_SCALER = "hasattr(self, 'loss_scaler')"


@fix.edit("deepspeed.runtime.constants")
def tell_the_two_wrappers_apart(source: Source) -> None:
    """Both names are "bf16", and upstream tests first for the one without ZeRO."""
    source.skip_if(f'{NAME} = "ddp_bf16"')
    source.replace(source.one(f'{NAME} = "bf16"').value, '"ddp_bf16"')


@fix.edit("deepspeed.runtime.bf16_optimizer", releases=SCALING)
def give_it_what_the_scaling_of_losses_reads(source: Source) -> None:
    """Since 0.18.3 each ZeRO optimizer scales losses; BF16_Optimizer, never selected, lacks the attributes."""
    source.function("BF16_Optimizer.backward_epilogue")  # up to 0.18.2 it has its own backward
    init = source.function("BF16_Optimizer.__init__")
    source.skip_if("self.custom_loss_scaler = ...", within=init)
    source.insert_after(source.one("self.grad_acc_dtype = grad_acc_dtype", within=init), UNSCALED)


@fix.edit("deepspeed.runtime.base_optimizer", releases=SCALING)
def do_not_scale_without_a_scaler(source: Source) -> None:
    """BF16_Optimizer has no loss scaler."""
    scale = source.function("ZeROOptimizer.scale_if_loss")
    source.skip_if(HAS_SCALER, within=scale)
    scaled = source.one(f"return {SCALED}", within=scale)
    source.replace(scaled.value, f"{SCALED} if {HAS_SCALER} else value")
