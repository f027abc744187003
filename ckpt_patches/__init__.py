"""The engine of training-checkpoint-patches: what a fix is, and the three ways to deliver it.

This package is imported at every start of the interpreter, so nothing is imported here.
"""

__version__ = "0.1.0"
