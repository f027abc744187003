"""What the rules judge: the bytes of a checkpoint, read once, and the ranges of odd elements in them."""
