"""load weights of an older checkpoint, ZeRO-3"""

from trainers import deepspeed_training as dt

if __name__ == "__main__":
    dt.show_weights_alone("stage3-2", load_optimizer_states=False)
