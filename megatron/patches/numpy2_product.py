"""Call `np.prod` instead of the alias `np.product`, which NumPy 2 removed.

https://github.com/NVIDIA/Megatron-LM/issues/1563
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NotNeeded, Source

fix = Fix(
    __name__,
    upstream=("https://github.com/NVIDIA/Megatron-LM/issues/1563",),
    symptom="`AttributeError: np.product` in a save or load",
    releases=(("0.12.0", "0.15.3"),),
    stacks="NumPy 2",
    silent=False,
)


# The calls moved between these modules from release to release.
@fix.edit(
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.mapping",
    "megatron.core.dist_checkpointing.validation",
    independent=True,
)
def call_prod(source: Source) -> None:
    """Both names are the same function in NumPy 1."""
    if b"np.product" not in source.data:
        raise NotNeeded
    for name in source.all("np.product"):
        source.replace(name, "np.prod")
