"""universal load with `round_robin_gradients`"""

from trainers import deepspeed_training as dt

if __name__ == "__main__":
    dt.show_resume("stage2_round_robin-2", ranks=3, universal=True)
