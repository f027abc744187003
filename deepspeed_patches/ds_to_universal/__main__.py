"""python -m deepspeed_patches.ds_to_universal"""

import sys

from deepspeed_patches.ds_to_universal.command import main

sys.exit(main())
