"""Load the optimizer state on the first rank of every optimizer instance, not only of the first instance.

https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.2/megatron/core/optimizer/distrib_optimizer.py
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NotConcerned, Source

fix = Fix(
    __name__,
    upstream=(
        "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.2/megatron/core/optimizer/distrib_optimizer.py",
    ),
    symptom="`'NoneType' object is not subscriptable` on one rank at a resume, others wait",
    releases=(("0.15.0", "0.19.2"),),
    stacks="dp_zero_gather_scatter, several optimizer instances",
    silent=False,
    test="tests/unit_tests/dist_checkpointing/test_dp_zero_instances.py",
)

INSTANCE = "self.distributed_optimizer_instance_id"


@fix.edit("megatron.core.optimizer.distrib_optimizer")
def load_on_each_instance(source: Source) -> None:
    """The first rank of each instance scatters the state, but upstream reads it on only one of them."""
    if not source.has(INSTANCE, within=source.function("DistributedOptimizer.sharded_state_dict")):
        raise NotConcerned  # before 0.10 there is one instance; up to 0.14 sharded saves with several fail
    function = source.function("DistributedOptimizer.sharded_param_state_dp_zero")
    first, loads = f"{INSTANCE} == 0", f"is_loading or {INSTANCE} == 0"
    branch = source.branch_around("param_state = ShardedObject(...)", within=function)
    read = source.one("ShardedObject(...)", within=branch)
    source.check_parts(
        {
            "each instance loads": source.has(loads, within=branch.test),
            "a replica of the object": "replica_id" in [keyword.arg for keyword in read.keywords],
        }
    )
    is_one_line = branch.test.end_lineno == branch.test.lineno
    source.replace(
        source.one(first, within=branch.test), f"(\n    {loads}\n)" if is_one_line else f"({loads})"
    )
    source.add_keyword(read, "replica_id", INSTANCE)
