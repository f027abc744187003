"""universal load with a param group of one element"""

from trainers import deepspeed_training as dt

if __name__ == "__main__":
    dt.show_resume("stage1-3", universal=True, raises="IndexError: list index")
