"""`python -m deepspeed_patches.ds_to_universal`: upstream's name for `ckpt-patches to-universal`."""

import sys

from ckpt_patches.convert.convert import Options, Summary, convert
from ckpt_patches.convert.convert_command import main

__all__ = ["Options", "Summary", "convert", "main"]

if __name__ == "__main__":
    sys.exit(main())
