"""Load a checkpoint with optimizer offload though some parameters are fp32 in the model already."""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import AlreadyThere, Source

HYBRID_OPTIMIZER = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
fix = Fix(
    __name__,
    upstream=("https://github.com/NovaSky-AI/SkyRL/issues/1401",),
    symptom="loading fails with `KeyError`",
    concerns=HYBRID_OPTIMIZER,
)


@fix.edit(HYBRID_OPTIMIZER)
def leave_fp32_parameters_out(source: Source) -> None:
    update = source.function("HybridDeviceOptimizer._update_fp32_params_by_new_state")
    if source.all("param not in self.param_to_fp32_param", within=update):
        raise AlreadyThere
    look_up = source.one("fp32_param = self.param_to_fp32_param[param]", within=update)
    source.insert_before(look_up, "if param not in self.param_to_fp32_param:\n    continue")
