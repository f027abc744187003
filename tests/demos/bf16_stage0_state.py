"""resume in bf16 with pipelining, without ZeRO"""

from trainers import deepspeed_training as dt

if __name__ == "__main__":
    dt.show_resume("pipeline-2", raises="KeyError: ")
