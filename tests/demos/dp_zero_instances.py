"""resume with two instances of the optimizer

Four data-parallel ranks, two per instance.
"""

from functools import partial
from pathlib import Path

from trainers import megatron_training as mt

RANKS, INSTANCES = 4, 2


def resume(rank: int, folder: Path) -> str:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=INSTANCES)
    return mt.resume(rank, "dp_zero_gather_scatter", folder, partial(mt.build, instances=INSTANCES), steps=3)


if __name__ == "__main__":
    mt.show_result(
        resume,
        RANKS,
        "saved; resumes bit for bit",
        raises="TypeError: 'NoneType' object is not subscriptable",
    )
