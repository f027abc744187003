"""A pytest plugin with stubs for Megatron-LM's imports that are new in Python 3.12 or from missing packages."""

from trainers import stub_imports

stub_imports.install()
