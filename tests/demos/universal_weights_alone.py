"""universal load of only the weights"""

from trainers import deepspeed_training as dt

if __name__ == "__main__":
    dt.show_universal_weights_alone("stage1-2", "stage2-2")
