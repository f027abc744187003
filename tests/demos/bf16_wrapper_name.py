"""resume in bf16, ZeRO-1, fp32 gradient accumulation"""

from trainers import deepspeed_training as dt

if __name__ == "__main__":
    dt.show_resume("bf16_optimizer-2", raises="AttributeError: 'FP16_UnfusedOptimizer'")
