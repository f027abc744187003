"""A plugin of pytest under which apex's tests run on a CPU."""

from ckpt_patches.demo import stand_in_apex

stand_in_apex.install()
