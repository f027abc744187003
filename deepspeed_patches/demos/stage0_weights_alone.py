"""load the weights alone, without ZeRO"""

from ckpt_patches.demo import deepspeed_training as dt

if __name__ == "__main__":
    dt.show_weights_alone("stage0_fp16-2", "stage0-2", load_optimizer_states=False)
