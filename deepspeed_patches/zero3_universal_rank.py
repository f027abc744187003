"""Resume ZeRO-3 from a universal checkpoint on several nodes: use the data-parallel rank, not the local rank.

https://github.com/deepspeedai/DeepSpeed/pull/7601
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import Source

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/deepspeedai/DeepSpeed/pull/7601",
        "https://github.com/deepspeedai/DeepSpeed/issues/6691",
    ),
    symptom="every node loads the parameter shards of the first node",
    releases=(("0.15.0", "0.17.6"),),
    stacks="universal load, ZeRO 3, several nodes",
    silent=True,
)

LOCAL, RANK = "local_rank", "rank"
OF_THE_NODE, OF_THE_PARTITIONS = "dist.get_local_rank()", "dist.get_rank(group=self.dp_process_group)"


@fix.edit("deepspeed.runtime.zero.stage3")
def take_the_part_of_the_rank(source: Source) -> None:
    """The tensor is partitioned over the data-parallel group, so the offset depends on the rank in it."""
    load = source.function("DeepSpeedZeroOptimizer_Stage3.load_hp_checkpoint_state")
    if not source.has(OF_THE_NODE, within=load) and not source.has(LOCAL, within=load):
        source.skip_if(OF_THE_PARTITIONS, within=load)
    asked = source.one(f"{LOCAL} = {OF_THE_NODE}", within=load)
    cut = source.one(f"loaded_checkpoint_state.narrow(0, {LOCAL} * partitioned_numel, partitioned_numel)", within=load)
    source.replace(asked, f"{RANK} = {OF_THE_PARTITIONS}")
    source.replace(cut, f"loaded_checkpoint_state.narrow(0, {RANK} * partitioned_numel, partitioned_numel)")
