"""Checkpoint fixes for megatron-core and DeepSpeed, and tools for their checkpoints.

This package is imported at every start of the interpreter, so nothing is imported here.
"""

__version__ = "0.1.0"
