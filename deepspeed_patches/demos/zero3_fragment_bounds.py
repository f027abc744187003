"""convert ZeRO-3 on 4 ranks"""

from ckpt_patches.demo import deepspeed_training as dt

if __name__ == "__main__":
    dt.show_conversion("stage3-1", ranks=4)
