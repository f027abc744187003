"""Names of optimizer tensors in Megatron's distributed checkpoints."""

# Followed by the names of the state and the parameter. With several optimizers there is a prefix.
OPTIMIZER_STATE = "optimizer.state."
# In the names of buckets, in the formats that store buckets of many parameters.
BUCKETS = "optimizer.distributed."


def is_bucket(name: str) -> bool:
    """Whether an array is a bucket of many parameters; the checkpoint does not store where each begins."""
    return BUCKETS in name
