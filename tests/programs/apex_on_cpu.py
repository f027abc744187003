"""A plugin of pytest under which apex's tests run on a CPU."""

from ckpt_patches.demo import stub_apex

stub_apex.install()
