"""universal load at ZeRO-3 on 2 nodes"""

from trainers import deepspeed_training as dt

if __name__ == "__main__":
    dt.show_resume("stage3-1", node=1, universal=True)
