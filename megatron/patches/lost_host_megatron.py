"""End a save or a load with the name of a host that was lost in the middle of it: docs/lost_host.md.

No fix, and nothing for upstream: what it calls is in `ckpt_patches.watch.lost_host`.
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import AlreadyThere, Source

fix = Fix(__name__, upstream=(), test="")

MODULE = "lost_host"


@fix.edit("megatron.core.dist_checkpointing.serialization", ours_alone=True)
def checkpoints(source: Source) -> None:
    """All ranks take part in these."""
    if source.imports(MODULE):
        raise AlreadyThere
    source.insert_import(f"from ckpt_patches.watch import {MODULE}")
    for name in ("save", "load"):
        source.decorate(source.function(name), f"@{MODULE}.watched")
