"""A plugin of pytest: what Megatron-LM imports from Python 3.12, on an older one, and from packages that are absent."""

from ckpt_patches.demo import stub_imports

stub_imports.install()
