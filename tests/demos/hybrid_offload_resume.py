"""resume with the optimizer offloaded to the CPU"""

from functools import partial

from trainers import megatron_training as mt

if __name__ == "__main__":
    offloaded = partial(mt.build, precision_aware=True, offload_fraction=0.5)
    on_a_gpu = "RuntimeError: Expected all tensors to be on the same device"
    mt.show_resume("torch", offloaded, steps=3, raises=("KeyError", on_a_gpu))
