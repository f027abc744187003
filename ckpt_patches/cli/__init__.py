"""The commands: parse arguments, call a room, print what it returns."""

from ckpt_patches.cli.command_line import main

__all__ = ["main"]
