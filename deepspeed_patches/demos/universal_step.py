"""universal load of the step"""

from ckpt_patches.demo import deepspeed_training as dt

if __name__ == "__main__":
    dt.allow_pickles()
    dt.show_resume("stage1-2", universal=True)
