"""`python -m ckpt_patches` is `ckpt-patches`."""

import sys

from ckpt_patches.cli import main

sys.exit(main())
