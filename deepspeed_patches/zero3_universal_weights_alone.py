"""Load only the weights of a universal checkpoint if optimizer states are not requested, at ZeRO 3.

https://github.com/deepspeedai/DeepSpeed/blob/v0.19.2/deepspeed/runtime/zero/stage3.py#L3164
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from typing import Any

STAGE3 = "deepspeed.runtime.zero.stage3"


fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/blob/v0.19.2/deepspeed/runtime/zero/stage3.py#L3164",),
    symptom="`load_optimizer_states=False` and `load_module_only=True` are ignored",
    releases=(("0.15.0", "0.19.2"),),
    stacks="universal load, ZeRO 3",
    silent=True,
    depends_on=("universal_weights_alone",),
)

OWNER = "DeepSpeedZeroOptimizer_Stage3"
LOAD = "load_hp_checkpoint_state_from_checkpoint_dir_stage3"
LOAD_WEIGHTS = "self._load_hp_weights_from_checkpoint_dir_stage3(checkpoint_folder, param_names)"
MODULE_LOAD = "self.load_module_checkpoint_state_from_checkpoint_dir_stage3(...)"
NAMES = "[[self.param_names[param] for param in group] for group in self.fp16_groups]"
NAMES_BEFORE_0_18 = "[list(shapes) for shapes in param_shapes]"
WEIGHTS_ALONE = f"""if not load_optimizer_states:
    param_names = {{}}
    {LOAD_WEIGHTS}
    return"""


class DeepSpeedZeroOptimizer_Stage3:
    """The method to insert into the class, and what it uses."""

    fp16_groups: "list[list[Any]]"
    fp16_partitioned_groups: "list[list[Any]]"
    fp16_partitioned_groups_flat: "list[Any]"
    fp32_partitioned_groups_flat: "list[Any]"
    load_hp_checkpoint_state: "Any"
    unflatten: "Any"

    def _load_hp_weights_from_checkpoint_dir_stage3(self, checkpoint_dir: str, param_names: "list[list[str]]") -> None:
        """Load only the fp32 parameters. Moments, steps, settings and loss scale are kept.

        Raises:
            ValueError: a parameter's size differs from the checkpoint.
            RuntimeError: this run's partitions are swapped out.
        """
        for sub_group_id, names in enumerate(param_names):
            fp32_partition = self.fp32_partitioned_groups_flat[sub_group_id]
            fp16_partition = self.fp16_partitioned_groups_flat[sub_group_id]
            sizes = [param.partition_numel() for param in self.fp16_groups[sub_group_id]]
            if fp16_partition is None or fp32_partition.numel() != sum(sizes):
                raise RuntimeError("expected parameters in memory to load weights alone, found them swapped out")
            offset = 0
            for number, name in enumerate(names):
                saved = self.load_hp_checkpoint_state(os.path.join(checkpoint_dir, "zero", name), "fp32")
                found = saved.numel()
                if found != sizes[number]:
                    raise ValueError(f"{name} has another size: {found} elements per rank, not {sizes[number]}")
                fp32_partition.data.narrow(0, offset, found).copy_(saved)
                offset += found
            fp16_partition.data.copy_(fp32_partition.data)
            partitions = self.fp16_partitioned_groups[sub_group_id]
            for number, loaded in enumerate(self.unflatten(fp16_partition, partitions)):
                partitions[number].data = loaded.data


@fix.edit(STAGE3)
def load_weights_without_states(source: Source) -> None:
    """Up to 0.19.2 upstream ignores `load_optimizer_states`."""
    load = source.function(f"{OWNER}._load_universal_checkpoint")
    source.skip_if(MODULE_LOAD, within=load)
    call = source.one(f"self.{LOAD}(...)", within=load)
    names = NAMES_BEFORE_0_18 if source.has(f"self.{LOAD}(checkpoint_folder, param_shapes)", within=load) else NAMES
    method = DeepSpeedZeroOptimizer_Stage3._load_hp_weights_from_checkpoint_dir_stage3
    source.skip_if(LOAD_WEIGHTS, method, within=load)
    source.insert_before(call, WEIGHTS_ALONE.format(names))
    source.insert_method_before(load, method)
