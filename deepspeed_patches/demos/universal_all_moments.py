"""universal load into a run that has not stepped"""

from ckpt_patches.demo import deepspeed_training as dt

if __name__ == "__main__":
    dt.allow_pickles()
    dt.show_resume("stage1-2", universal=True, raises="AttributeError: 'NoneType' object has no attribute 'keys'")
