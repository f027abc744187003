"""gather the optimizer's state on rank 0"""

from pathlib import Path

from ckpt_patches.demo import megatron_training as mt
from ckpt_patches.demo import show
from ckpt_patches.demo.memory import MIB, large, peak, return_freed_memory, size

ELEMENTS = MIB // 2  # per bucket


def run(folder: Path) -> str:
    return_freed_memory()
    buckets = mt.results(gather, 4)[0]
    return f"rank 0 needs the state and {buckets:.1f} buckets more" if buckets > 1 else ""


def gather(rank: int) -> float:
    """This rank's memory use beyond the gathered state, in buckets."""
    mt.use_inner_optimizer("fused")
    optimizer = large(ELEMENTS, bucket_size=ELEMENTS)
    state, used, _ = peak(optimizer.get_parameter_state_dp_zero)
    return (used - size(state)) / (4 * ELEMENTS / MIB)


if __name__ == "__main__":
    show(run, "rank 0 needs the state and less than a bucket more")
