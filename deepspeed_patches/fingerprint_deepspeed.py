"""Record fingerprints of the optimizer state at each save, and check them after each load: docs/guides/fingerprint.md.

Not a fix, and not meant for upstream: it calls `ckpt_patches.fingerprint.run_deepspeed`.
"""

from ckpt_patches.engine.fix import Fix
from ckpt_patches.engine.source import NotNeeded, Source

fix = Fix(__name__, upstream=(), test="", switch="fingerprint")

MODULE = "run_deepspeed"


@fix.edit("deepspeed.runtime.engine", ours_alone=True)
def engine(source: Source) -> None:
    """All ranks take part in a save and a load."""
    if source.imports(MODULE):
        raise NotNeeded
    source.insert_import(f"from ckpt_patches.fingerprint import {MODULE}")
    source.decorate(source.function("DeepSpeedEngine.save_checkpoint"), f"@{MODULE}.saving")
    source.decorate(source.function("DeepSpeedEngine.load_checkpoint"), f"@{MODULE}.loading")
