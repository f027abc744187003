"""Load checkpoints of the fast and decoupled writers with torch 2.6 and later.

https://github.com/deepspeedai/DeepSpeed/issues/8500
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import Source

fix = Fix(
    __name__,
    upstream=("https://github.com/deepspeedai/DeepSpeed/issues/8500",),
    symptom="`UnpicklingError: Weights only load failed`, with a checkpoint writer",
    releases=(("0.17.1", newest("deepspeed")),),
    stacks="ZeRO, `checkpoint.writer`, torch 2.6 or later",
    silent=False,
    test="tests/unit/checkpoint/test_fast_writer_load.py",
)

LOAD = "torch.load(path, map_location=map_location)"
AS_THE_TORCH_ENGINE = "torch.load(path, map_location=map_location, weights_only=False)"


@fix.edit(
    "deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine",
    "deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine",
)
def load_as_the_torch_engine_does(source: Source) -> None:
    """Upstream fixed only the default, TorchCheckpointEngine."""
    source.skip_if(AS_THE_TORCH_ENGINE)
    source.replace(source.one(LOAD), AS_THE_TORCH_ENGINE)
