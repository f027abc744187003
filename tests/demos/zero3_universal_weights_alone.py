"""universal load of only the weights, ZeRO-3"""

from trainers import deepspeed_training as dt

if __name__ == "__main__":
    dt.show_universal_weights_alone("stage3-1")
