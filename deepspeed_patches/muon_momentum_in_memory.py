"""Resume Muon at ZeRO-3 from the loaded momentum with `save_muon_momentum_buffer_in_memory`.

https://github.com/deepspeedai/DeepSpeed/pull/7919
"""

import ast
from typing import Any

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NoMatch, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch

STAGE3 = "deepspeed.runtime.zero.stage3"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/7919",),
    symptom="the steps after a resume begin with a momentum of zeros",
    releases=(("0.18.9", newest("deepspeed")),),
    stacks="Muon, ZeRO 3 with `save_muon_momentum_buffer_in_memory`",
    silent=True,
    test="tests/unit/ops/muon/test_muon_momentum_in_memory.py",
)

OWNER = "DeepSpeedZeroOptimizer_Stage3"
LOAD, LOAD_UNIVERSAL = "_rigid_load_state_dict", "load_hp_checkpoint_state_from_checkpoint_dir_stage3"
KEEP = "self._keep_loaded_muon_momentum()"


class DeepSpeedZeroOptimizer_Stage3:
    """The method to insert into the class, and what it uses."""

    optimizer: "Any"
    fp32_partitioned_groups_flat: "list[torch.Tensor]"

    def _keep_loaded_muon_momentum(self) -> None:
        """Copy the loaded momentum into the buffers in memory that steps and saves use."""
        buffers = getattr(self, "muon_momentum_buffer_partitioned_groups_flat", {})
        for sub_group_id, buffer in buffers.items():
            state = self.optimizer.state[self.fp32_partitioned_groups_flat[sub_group_id]]
            if "momentum_buffer" not in state:
                raise ValueError(f"expected the momentum of sub-group {sub_group_id}, found {sorted(state)}")
            buffer.copy_(state["momentum_buffer"])
            state["momentum_buffer"] = buffer


@fix.edit(STAGE3)
def keep_the_loaded_momentum(source: Source) -> None:
    """Upstream loads it into the optimizer's state, where the next step replaces it by the buffer in memory."""
    source.some("self.muon_momentum_buffer_partitioned_groups_flat")
    load, load_universal = (source.function(f"{OWNER}.{name}") for name in (LOAD, LOAD_UNIVERSAL))
    method = DeepSpeedZeroOptimizer_Stage3._keep_loaded_muon_momentum
    source.skip_if((KEEP, load), KEEP, method, within=load_universal)
    branch = source.branch("load_optimizer_states", within=load)
    source.insert_after(source.one("self._clear_fp32_optimizer_param_groups()", within=branch), KEEP)
    swapped = [one for one in source.all_of(ast.If, load_universal) if source.text(one.test) == "self.swap_optimizer"]
    if not swapped:
        raise NoMatch(f"expected `if self.swap_optimizer` in {LOAD_UNIVERSAL}, found none")
    source.insert_before(swapped[0], KEEP)
    source.insert_method_before(load, method)
