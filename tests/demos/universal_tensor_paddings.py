"""convert ZeRO-1 with a param group of one element"""

from trainers import deepspeed_training as dt

if __name__ == "__main__":
    dt.show_conversion("bf16_optimizer-3", ranks=2, raises="RuntimeError: narrow(): length must be non-negative")
