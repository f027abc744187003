"""Drop the secondary copies of all parameters, including frozen ones, after a load with hpZ.

https://github.com/deepspeedai/DeepSpeed/pull/7130
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STAGE3 = "deepspeed.runtime.zero.stage3"

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/pull/7130",),
    symptom="training continues with the frozen weights that the new run began with",
    releases=(("0.15.0", newest("deepspeed")),),
    stacks="ZeRO 3 with `zero_hpz_partition_size`, frozen parameters (LoRA)",
    silent=True,
    test="tests/unit/checkpoint/test_hpz_secondary_weights.py",
)

OWNER = "DeepSpeedZeroOptimizer_Stage3"
OF_TRAINED = "self.invalidate_secondary_tensor()"
OF_ALL = "self._invalidate_all_secondary_tensors()"


class DeepSpeedZeroOptimizer_Stage3:
    """The method to insert into the class, and what it uses."""

    module: "Any"

    def _invalidate_all_secondary_tensors(self) -> None:
        """Drop all secondary tensors after a load, including those of frozen parameters.

        Quantized ones stay, because partitioning quantizes them before it copies the values.
        """
        for param in self.module.parameters():
            secondary_tensor = getattr(param, "ds_secondary_tensor", None)
            if secondary_tensor is not None and not hasattr(secondary_tensor, "ds_quant_scale"):
                param.ds_secondary_tensor = None


@fix.edit(STAGE3)
def drop_the_copies_of_frozen_parameters(source: Source) -> None:
    """Upstream drops only the copies of trained parameters, and up to 0.18.2 none."""
    epilogue = source.function(f"{OWNER}.checkpoint_event_epilogue")
    method = DeepSpeedZeroOptimizer_Stage3._invalidate_all_secondary_tensors
    source.skip_if(OF_ALL, method, within=epilogue)
    if source.has(OF_TRAINED, within=epilogue):
        source.replace(source.one(OF_TRAINED, within=epilogue), OF_ALL)
    else:
        source.insert_at_start(epilogue, OF_ALL)
    source.insert_method_before(epilogue, method)
