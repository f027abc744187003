"""The import hook behind `ckpt_patches`: finder, loaders, checks of the code that runs, and log lines.

Nothing here is imported before the first target module.
"""
