"""dp_zero_instances: a run with two instances of the distributed optimizer resumes."""

from functools import partial
from pathlib import Path

from trainers.lazy import mt
from upstream import proof

test_the_save_or_the_load_fails, test_a_resume_goes_on_bit_for_bit = proof(
    __file__, "TypeError: 'NoneType' object is not subscriptable"
)


# What the ranks run

RANKS, INSTANCES = 4, 2


def resume(rank: int, folder: Path) -> str:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=INSTANCES)
    return mt.resume(rank, "dp_zero_gather_scatter", folder, partial(mt.build, instances=INSTANCES), steps=3)


def bug(folder: Path) -> str:
    """Four data-parallel ranks, two per instance."""
    return str(mt.results(resume, RANKS, folder / "checkpoint")[0])
