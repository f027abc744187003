"""Resume Muon at ZeRO 1 and 2: convert the loaded fp32 momentum to the dtype of the gradients.

https://github.com/deepspeedai/DeepSpeed/issues/7746
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NotNeeded, Source

STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2"

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/issues/7746",
        "https://github.com/deepspeedai/DeepSpeed/pull/8433",
        "https://github.com/deepspeedai/DeepSpeed/pull/8483",
    ),
    symptom="the first step of a resume fails: `expected dtype float for 'end'`",
    releases=(("0.18.3", "0.19.6"),),
    stacks="Muon, ZeRO 1 and 2, bf16 or fp16",
    silent=False,
)

MUON_GROUP = "getattr(tensor_list[0], 'use_muon', False) and 'muon' in self.optimizer.__class__.__name__.lower()"
NO_MOMENTUM = f'"momentum_buffer" not in self.optimizer.state[flatten_copy] and {MUON_GROUP}'
STATE = "muon_state, grads = self.optimizer.state[flatten_copy], self.all_grad_tensors[param_group_idx]"
# A load casts each state to fp32, the flat parameter's dtype. The saved state has the gradients' dtype: no loss.
CONVERT = f"""if {MUON_GROUP}:
    {STATE}
    muon_state["momentum_buffer"] = muon_state["momentum_buffer"].to(grads[0].dtype)"""


@fix.edit(STAGE_1_AND_2)
def convert_a_loaded_momentum(source: Source) -> None:
    """Upstream creates a missing momentum, but uses an existing one without conversion."""
    if source.has_function("DeepSpeedZeroOptimizer._muon_momentum_buffer"):
        raise NotNeeded
    partition = source.function("DeepSpeedZeroOptimizer.get_flat_partition")
    source.skip_if(STATE, within=partition)
    if source.has("torch.narrow(...).view(tensor.size()).to(device).to(dtype)", within=partition):
        raise NotNeeded  # up to 0.18.2 a step converts its copy of the momentum, and copies it back
    source.insert_after(source.branch(NO_MOMENTUM, within=partition), CONVERT)
