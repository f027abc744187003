"""Load the optimizer state on the first rank of every optimizer instance, not only of the first instance.

https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.2/megatron/core/optimizer/distrib_optimizer.py
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import Source

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.2/megatron/core/optimizer/distrib_optimizer.py",
    ),
    symptom="`'NoneType' object is not subscriptable` on one rank at a resume, others hang",
    releases=(("0.15.0", "0.19.2"),),
    stacks="dp_zero_gather_scatter, several optimizer instances",
    silent=False,
    test="tests/unit_tests/dist_checkpointing/test_dp_zero_instances.py",
)

INSTANCE = "self.distributed_optimizer_instance_id"


@fix.edit("megatron.core.optimizer.distrib_optimizer")
def load_on_each_instance(source: Source) -> None:
    """The first rank of each instance scatters the state, but upstream reads it on only one of them."""
    # Up to 0.14 sharded saves with several instances fail.
    source.some(INSTANCE, within=source.function("DistributedOptimizer.sharded_state_dict"))
    function = source.function("DistributedOptimizer.sharded_param_state_dp_zero")
    first, loads = f"{INSTANCE} == 0", f"is_loading or {INSTANCE} == 0"
    branch = source.branch_around("param_state = ShardedObject(...)", within=function)
    read = source.one("ShardedObject(...)", within=branch)
    names = [keyword.arg for keyword in read.keywords]
    source.skip_if(loads, "replica_id" in names, within=branch.test)
    is_one_line = branch.test.end_lineno == branch.test.lineno
    source.replace(
        source.one(first, within=branch.test), f"(\n    {loads}\n)" if is_one_line else f"({loads})"
    )
    source.add_keyword(read, "replica_id", INSTANCE)
