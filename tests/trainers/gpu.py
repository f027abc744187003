"""Whether the programs run on a real GPU instead of the CPU or a stub GPU; the tests marked `gpu` request it."""

import os

SWITCH = "DEMO_ON_A_GPU"
REAL_GPU = os.environ.get(SWITCH) == "1"
if REAL_GPU:
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else a process that has queried the GPUs cannot fork ranks


def share_gpu(rank: int) -> None:
    """Let this rank share a GPU with others. NCCL allows this only for ranks that appear to be on different hosts."""
    os.environ["NCCL_HOSTID"] = str(rank)
