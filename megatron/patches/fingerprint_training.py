"""Check after each load that the data position equals the saved one.

Not a fix, and not meant for upstream: it calls `ckpt_patches.fingerprint.run_megatron`.
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NotNeeded, Source

fix = Fix(__name__, upstream=(), test="", switch="fingerprint")

MODULE = "run_megatron"


@fix.edit("megatron.training.checkpointing", ours_alone=True)
def loads(source: Source) -> None:
    """When it returns, a resume is complete."""
    if source.imports(MODULE):
        raise NotNeeded
    source.insert_import(f"from ckpt_patches.fingerprint import {MODULE}")
    source.decorate(source.function("load_checkpoint"), f"@{MODULE}.run_verified")
