"""save in several buckets"""

from functools import partial

from trainers import megatron_training as mt

if __name__ == "__main__":
    mt.show_resume("fully_reshardable", partial(mt.build, bucket_size=300), steps=3)
