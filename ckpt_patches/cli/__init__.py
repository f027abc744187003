"""The command line: parse arguments, call a tool, print its result."""

from ckpt_patches.cli.command_line import main

__all__ = ["main"]
