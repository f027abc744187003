"""Save the optimizer state in a format that the release supports if the caller specifies none.

https://github.com/NVIDIA/Megatron-LM/issues/2956
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NoMatch, Source

MAPPING = "megatron.core.dist_checkpointing.mapping"
REFUSED = b"if self.flattened_range is not None:"


fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/Megatron-LM/issues/2956",),
    symptom="`ShardedTensor.flattened_range is not supported` in a save",
    releases=(("0.16.0", newest("megatron-core")),),
    stacks="direct calls of `sharded_state_dict` without a format",
    silent=False,
    test="tests/unit_tests/dist_checkpointing/test_sharding_type_default.py",
)


@fix.edit(MAPPING)
def flattened_ranges_are_refused(source: Source) -> None:
    """Up to 0.15, upstream's default, which uses flattened ranges, can be saved."""
    lines = [line.strip() for line in source.data.splitlines()]
    tests = [number for number, line in enumerate(lines) if line == REFUSED]
    if not any(lines[number + 1].startswith(b"raise ") for number in tests):
        raise NoMatch("expected `if self.flattened_range is not None` with a `raise`, found none")


@fix.edit("megatron.core.optimizer.distrib_optimizer")
def default_to_what_can_be_saved(source: Source) -> None:
    """Use Megatron-LM's own default. Upstream's default here fails a few calls later."""
    method = source.function("DistributedOptimizer.sharded_state_dict")
    default = "(metadata or {}).get('distrib_optim_sharding_type', 'dp_reshardable')"
    source.skip_if(default, within=method)
    call = source.one(
        "(metadata or {}).get('distrib_optim_sharding_type', 'fully_sharded_model_space')",
        within=method,
    )
    source.replace(call, default)
