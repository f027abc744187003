"""save before the first step"""

from trainers import megatron_training as mt

if __name__ == "__main__":
    mt.show_resume("torch", mt.build, steps=0, raises="KeyError: 'exp_avg'")
