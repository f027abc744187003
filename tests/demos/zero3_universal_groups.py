"""universal load at ZeRO-3, 2 param groups"""

from trainers import deepspeed_training as dt

if __name__ == "__main__":
    dt.show_resume("stage3_groups-2", universal=True)
