"""The import hook, behind what stands in `ckpt_patches.startup`: finder, loaders, what runs, and what is said of it.

Nothing here is imported before the first target module is met.
"""
