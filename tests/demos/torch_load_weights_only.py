"""resume under torch 2.6 or later"""

from trainers import deepspeed_training as dt

if __name__ == "__main__":
    dt.show_resume("stage1-2", raises="UnpicklingError: Weights only load failed")
