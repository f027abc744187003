"""Convert a DeepSpeed ZeRO checkpoint to a universal checkpoint in one pass."""
