"""How Megatron's distributed checkpoints name the tensors of an optimizer."""

# Then the state's name, and the parameter's; with several optimizers there is something in front.
OPTIMIZER_STATE = "optimizer.state."
# The formats that keep the buckets of many parameters name them so.
BUCKETS = "optimizer.distributed."


def is_bucket(name: str) -> bool:
    """Whether an array is a bucket of many parameters; where each of them begins is not in the checkpoint."""
    return BUCKETS in name
