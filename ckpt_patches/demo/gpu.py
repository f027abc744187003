"""Whether the programs run on a real GPU, in the place of the CPU or a stand-in; the tests marked `gpu` ask for it."""

import os

SWITCH = "DEMO_ON_A_GPU"
REAL_GPU = os.environ.get(SWITCH) == "1"
if REAL_GPU:
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else a process that has asked for GPUs cannot fork ranks


def share_gpu(rank: int) -> None:
    """Let this rank use a GPU that others use. NCCL allows it only to ranks that it takes for those of other hosts."""
    os.environ["NCCL_HOSTID"] = str(rank)
