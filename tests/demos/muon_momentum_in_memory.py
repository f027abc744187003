"""resume Muon, ZeRO 3, save_muon_momentum_buffer_in_memory"""

from trainers import deepspeed_training as dt
from trainers import optimizers

if __name__ == "__main__":
    # One parameter per sub-group: up to 0.19.7 Muon's step gathers only equal sizes over Gloo.
    optimizers.show_resume(
        "Muon-3", tags=(dt.TAG, dt.UNIVERSAL), save_muon_momentum_buffer_in_memory=True, sub_group_size=4
    )
