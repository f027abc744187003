"""load only the weights, without ZeRO"""

from trainers import deepspeed_training as dt

if __name__ == "__main__":
    of_0_17_6 = "AttributeError: 'FP16_UnfusedOptimizer' object has no attribute '_restore_from_bit16_weights'"
    dt.show_weights_alone("stage0_fp16-2", "stage0-2", raises=of_0_17_6, load_optimizer_states=False)
