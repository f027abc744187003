"""resume Muon, ZeRO 3, save_muon_momentum_buffer_in_memory"""

from ckpt_patches.demo import deepspeed_training as dt
from ckpt_patches.demo import optimizers

if __name__ == "__main__":
    # A parameter each sub-group: up to 0.19.7 Muon's step gathers only parameters of one size over Gloo.
    optimizers.show_resume(
        "Muon-3", tags=(dt.TAG, dt.UNIVERSAL), save_muon_momentum_buffer_in_memory=True, sub_group_size=4
    )
