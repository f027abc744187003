"""load of the hybrid optimizer's state, with a parameter in fp32"""

from pathlib import Path

from ckpt_patches.demo import megatron_training as mt
from ckpt_patches.demo import show


def load(rank: int) -> str:
    mt.use_inner_optimizer("fused")
    model, optimizer = mt.build(precision_aware=True, offload_fraction=1.0, native_fp32=True)
    mt.step(model, optimizer, 0)
    hybrid = mt.inner(optimizer).optimizer
    hybrid.load_state_dict(hybrid.state_dict())
    return ""


def run(folder: Path) -> str:
    return str(mt.results(load, 1)[0])


if __name__ == "__main__":
    show(run, "loaded", raises="KeyError")
