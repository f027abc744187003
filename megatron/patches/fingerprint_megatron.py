"""Record fingerprints of the optimizer state at each save, and check them after each load: docs/guides/fingerprint.md.

Not a fix, and not meant for upstream: it calls `ckpt_patches.fingerprint.run_megatron`.
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.releases import newest
from ckpt_patches.engine.source import NotNeeded, Source

fix = Fix(__name__, upstream=(), test="", switch="fingerprint")

MODULE = "run_megatron"
IMPORT = f"from ckpt_patches.fingerprint import {MODULE}"


@fix.edit("megatron.core.optimizer.optimizer", ours_alone=True)
def optimizers(source: Source) -> None:
    """A chain's state is complete only when the outermost optimizer has loaded."""
    begin(source)
    for name in ("Float16OptimizerWithFloat16Params", "FP32Optimizer"):
        decorate(source, f"{name}.sharded_state_dict", "noted")
        decorate(source, f"{name}.load_state_dict", "verified")
    decorate(source, "ChainedOptimizer.sharded_state_dict", "noted")
    decorate(source, "ChainedOptimizer.load_state_dict", "verified")


@fix.edit("megatron.core.optimizer.distrib_optimizer", ours_alone=True)
def distributed_optimizer(source: Source) -> None:
    begin(source)
    decorate(source, "DistributedOptimizer.sharded_state_dict", "noted")
    decorate(source, "DistributedOptimizer.load_state_dict", "verified")


@fix.edit(
    "megatron.core.optimizer.layer_wise_optimizer",
    releases=(("0.16.0", newest("megatron-core")),),
    ours_alone=True,
)
def layer_wise_optimizer(source: Source) -> None:
    """A chain with its own methods around those of `ChainedOptimizer`. Since 0.16.

    Commits on the way to 0.16.0 load as any chain does.
    """
    begin(source)
    decorate(source, "LayerWiseDistributedOptimizer.sharded_state_dict", "noted")
    if source.has_function("LayerWiseDistributedOptimizer.load_state_dict"):
        decorate(source, "LayerWiseDistributedOptimizer.load_state_dict", "verified")


@fix.edit("megatron.core.optimizer_param_scheduler", ours_alone=True)
def scheduler(source: Source) -> None:
    """It is loaded after the optimizer, or not at all: then its next step says so."""
    begin(source)
    decorate(source, "OptimizerParamScheduler.step", "scheduler_steps")
    decorate(source, "OptimizerParamScheduler.load_state_dict", "scheduler_verified")


@fix.edit("megatron.core.dist_checkpointing.serialization", ours_alone=True)
def checkpoints(source: Source) -> None:
    """All ranks take part in these: a save combines their fingerprints in a record, and a load returns it."""
    begin(source)
    decorate(source, "save", "saving")
    decorate(source, "load", "loading")


def begin(source: Source) -> None:
    """Import the module to call."""
    if source.imports(MODULE):
        raise NotNeeded
    source.insert_import(IMPORT)


def decorate(source: Source, function: str, by: str) -> None:
    """Decorate a function with one of ours."""
    source.decorate(source.function(function), f"@{MODULE}.{by}")
